"""Blocks as they came from a disk or a bucket, and their way into memory that counts on them. Of
what was read only the headers were checked before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.checksum import Sums, copy_ranges, sums


@dataclass(frozen=True, slots=True)
class Fetched:
    """A record in its reader's buffer."""

    header: BlockHeader
    payload: memoryview

    @property
    def shape(self) -> tuple[int, int]:
        """What blocks that are copied together have alike: bytes, head groups."""
        return self.header.length, len(self.header.checksums)

    def is_right(self) -> bool:
        """Say whether the payload is what its header says."""
        length, groups = self.shape
        return sums(self.payload, 0, length // groups, groups) == self.header.checksums


def copy_all(blocks: Sequence[Fetched], addresses: Sequence[int]) -> list[bool]:
    """Copy the payloads of blocks of one shape to where each shall be in this process's memory, and
    say of each whether what is there then is right. Blocking, mostly without the interpreter lock;
    the caller keeps the memory."""
    assert len(blocks) == len(addresses)  # the compiled library does not look
    length, groups = blocks[0].shape
    sources = [np.frombuffer(block.payload, dtype=np.uint8).ctypes.data for block in blocks]
    targets = np.array(addresses, dtype=np.uint64)
    found = Sums.of(len(blocks), groups)
    copy_ranges(targets, np.array(sources, dtype=np.uint64), length, found, 0, len(blocks))
    expected = np.array([block.header.checksums for block in blocks], dtype=np.uint64)
    right: list[bool] = (found.values == expected).all(axis=1).tolist()
    return right
