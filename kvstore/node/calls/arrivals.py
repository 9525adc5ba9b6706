"""Bytes of puts that come, or have come, and that nobody has vouched for yet.

They lie in slots that nobody can read, and each slot's move goes on until they are judged or
discarded: so whatever ends a put, its slots are free only when their bytes have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvass.common.checksum import Sums, Words
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Move


@dataclass(frozen=True, slots=True)
class Judged:
    """Keys and chain indices of blocks that are in now, indices of those that were wrong, and the
    bytes of the former."""

    keys: list[bytes]
    stored: list[int]
    corrupt: list[int]
    size_bytes: int


@dataclass(slots=True, eq=False)
class Arrival:
    """One put's blocks. Ends every move that it was given, once. Mutable fields: `moves` that have
    not ended, `found` (checksums of what is in their slots, move by move)."""

    index: Index
    moves: Sequence[Move]
    found: Sums

    @classmethod
    def of(cls, index: Index, moves: Sequence[Move]) -> Arrival:
        """Return one of which nothing has come."""
        groups = len(moves[0].groups) if moves else 1
        return cls(index, moves, Sums.of(len(moves), groups))

    def judge(self, announced: Words) -> Judged:
        """Show the blocks whose checksums are those that were announced, uint64 [moves, groups],
        and end all moves. No bytes move any more."""
        there = self.found.whole
        right = there & (self.found.values == announced).all(axis=1)
        moves, self.moves = self.moves, ()
        found: list[list[int] | None] = self.found.values.tolist()
        if not right.all():
            found = [each if ok else None for each, ok in zip(found, right.tolist(), strict=True)]
        stored = self.index.end_moves(moves, found)
        headers = [move.entry.header for move, is_in in zip(moves, stored, strict=True) if is_in]
        wrong = np.flatnonzero(there & ~right).tolist()
        return Judged(
            keys=[header.key for header in headers],
            stored=[header.index for header in headers],
            corrupt=[moves[place].entry.header.index for place in wrong],
            size_bytes=len(headers) * moves[0].size if moves else 0,
        )

    def discard(self) -> None:
        """End all moves of what nobody will vouch for. No bytes move any more."""
        moves, self.moves = self.moves, ()
        if moves:
            self.index.end_moves(moves, [None] * len(moves))
