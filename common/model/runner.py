"""From pieces of requests to one forward pass: builds the row tensors of a step and runs it.

It knows tensors and nothing of requests: a piece is a run of tokens, where it starts, and the slots
of its blocks. Prefill and decode both step through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvass.common.kernels.seam import PagedKv
from kvass.common.model.load import Model
from kvass.common.model.products import COUNTS, Use

# A step of one or two rows is hundreds of operations of some microseconds: waking a second thread
# for each takes longer than it saves (measured, default model, one row: 60 ms against 86), and a
# core is left to others. Bits don't change with the number of threads: row counts are searched with
# both (`uses`), and tests/test_determinism.py looks.
# Where the compiled library multiplies, with threads of its own, torch has one for every step: its
# second one looks for work for milliseconds after each operation and takes a core from them
# (measured, 512 rows: the products take 119 ms instead of 190).
FEW_ROWS = 2


def uses() -> list[Use]:
    """Return the thread counts that a runner made in this thread will compute products with."""
    return [Use(1, FEW_ROWS), Use(torch.get_num_threads(), COUNTS[-1])]


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one request.

    `tokens` stand at positions `start` …; `slots` is the request's block table and reaches at least
    to the last of them. `write`: store their KV. `logits`: return those of the last row.
    """

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]
    write: bool = True
    logits: bool = False


class Runner:
    """A model over one paged pool. Use it from one thread at a time; it sets torch's threads."""

    def __init__(self, model: Model, kv: PagedKv[Any], block_tokens: int) -> None:
        self._model = model
        self._kv = kv
        self._block_tokens = block_tokens
        self._threads = 1 if model.is_packed else torch.get_num_threads()

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        """Compute one step; returns logits float32 [pieces with `logits`, vocab], in order.

        None when no piece wants logits: then of the last layer only K and V are computed.
        """
        assert pieces
        tables = self._tables(pieces)
        # Lists first, and few tensors: an operation on a tensor costs as much as some dozen rows.
        tokens: list[int] = []
        positions: list[int] = []
        row_table: list[int] = []
        written: list[int] = []
        logits_rows: list[int] = []
        for number, piece in enumerate(pieces):
            first, count = len(tokens), len(piece.tokens)
            tokens += piece.tokens
            positions += range(piece.start, piece.start + count)
            row_table += [number] * count
            if piece.write:
                written += range(first, first + count)
            if piece.logits:
                logits_rows.append(first + count - 1)
        size = self._block_tokens
        slots = [pieces[row_table[row]].slots[positions[row] // size] for row in written]
        offsets = [positions[row] % size for row in written]
        _use_threads(1 if len(tokens) <= FEW_ROWS else self._threads)
        rows = _tensor([tokens, positions, row_table])
        targets = _tensor([slots, offsets])
        with torch.inference_mode():
            return self._model.forward(
                rows[0],
                rows[1],
                self._kv,
                self._kv.plan(tables, rows[2], rows[1]),
                None if len(written) == len(tokens) else _tensor(written),
                targets[0],
                targets[1],
                _tensor(logits_rows) if logits_rows else None,
            )

    def _tables(self, pieces: Sequence[Rows]) -> torch.Tensor:
        """Return block tables int64 [pieces, blocks], as long as the longest context needs."""
        size = self._block_tokens
        needs = [-(-(piece.start + len(piece.tokens)) // size) for piece in pieces]
        # numpy reads a list in a sixth of torch's time: eight of 512 slots take 0.05 ms.
        tables = np.empty((len(pieces), max(needs)), np.int64)
        for table, piece, need in zip(tables, pieces, needs, strict=True):
            table[:need] = piece.slots[:need]
            table[need:] = piece.slots[0]
        return torch.from_numpy(tables)


def _use_threads(threads: int) -> None:
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def _tensor(numbers: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
