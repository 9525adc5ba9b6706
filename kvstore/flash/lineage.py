"""Which blocks of a log were computed upon which. Pure, of files' records.

A block is known by the first eight bytes of its key: two that share them by chance are taken for
one, and one too many goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvass.common.keys import SEGMENT_BLOCKS
from kvass.kvstore.flash.records import FileIndex
from kvass.kvstore.flash.table import U64, hashes_in, hashes_of


@dataclass(frozen=True, slots=True)
class Computed:
    """Keys of blocks; of them, `ends` are the last ones of their segments: what was computed upon
    these may be elsewhere."""

    keys: set[bytes]
    ends: list[bytes]


def computed_upon(indexes: Iterable[FileIndex], writer: str, wrong: Collection[bytes]) -> Computed:
    """Return the blocks that a writer wrote, those that are named as wrong, and all that was
    computed upon either."""
    files = [index for index in indexes if len(index.rows)]
    if not files:
        return Computed(set(), [])
    rows = np.concatenate([index.rows for index in files])
    chosen = np.concatenate([_by(index, writer) for index in files])
    names = hashes_in(rows["key"])
    named = np.unique(hashes_of(list(wrong))) if wrong else np.empty(0, dtype=np.uint64)
    chosen |= np.isin(names, named)
    order = np.argsort(rows["parent"], kind="stable")
    parents = rows["parent"][order]
    front = np.unique(np.concatenate([names[chosen], named]))
    while len(front):
        children = order[_ranges(parents, front)]
        fresh = children[~chosen[children]]
        chosen[fresh] = True
        front = np.unique(names[fresh])
    rows = rows[chosen]
    last = rows["index"] % SEGMENT_BLOCKS == SEGMENT_BLOCKS - 1
    ends = dict.fromkeys(row.tobytes() for row in rows["key"][last])
    return Computed({row.tobytes() for row in rows["key"]}, list(ends))


def _by(index: FileIndex, writer: str) -> NDArray[np.bool_]:
    wrote = np.array([origin.writer == writer for origin in index.origins], dtype=bool)
    found: NDArray[np.bool_] = wrote[index.rows["origin"]]
    return found


def _ranges(ordered: U64, values: U64) -> NDArray[np.int64]:
    """Return where the values are in an ordered array, each as often as it is there."""
    first = np.searchsorted(ordered, values, "left")
    counts = np.searchsorted(ordered, values, "right") - first
    starts = np.cumsum(counts) - counts
    found: NDArray[np.int64] = np.repeat(first - starts, counts) + np.arange(counts.sum())
    return found
