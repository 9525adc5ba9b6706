"""Bytes of puts that come, or have come, and that nobody has vouched for yet.

A same-host writer's bytes are read as soon as it has a place for them, while it computes the
checksums that its commit brings. Until then they lie in slots that nobody can read, and each slot's
move goes on: so whatever ends a put, its slots are free only when their bytes have stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
from numpy.typing import NDArray

from kvass.common.checksum import Sums, Words
from kvass.common.errors import Invalid
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Move

EARLY_S = 0.25  # how long a commit waits for the begin that was sent before it


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """What a writer says that its blocks are: `sums` uint64 [keys, groups]."""

    keys: Sequence[bytes]
    sums: Words


@dataclass(slots=True, eq=False)
class Arrival:
    """One put's blocks. Mutable fields: `moves` that have not ended, `found` (checksums of what is
    in their slots, move by move), `taken_s` (how long it took), `over` (no bytes move any more)."""

    session: str
    ends_s: float
    moves: Sequence[Move]
    found: Sums
    taken_s: float = 0.0
    over: anyio.Event = field(default_factory=anyio.Event)

    @classmethod
    def of(cls, session: str, ends_s: float, moves: Sequence[Move]) -> Arrival:
        """Return one of which nothing has come."""
        groups = len(moves[0].groups) if moves else 1
        return cls(session, ends_s, moves, Sums.of(len(moves), groups))

    def judged(self, announced: Announced) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return of each move whether what is in its slot is what was announced, and whether it is
        not."""
        keys = [move.entry.header.key for move in self.moves]
        there, expected = self.found.whole, announced.sums
        if list(announced.keys) != keys:
            places = {key: place for place, key in enumerate(announced.keys)}
            chosen = np.array([places.get(key, -1) for key in keys], dtype=np.intp)
            there = there & (chosen >= 0)
            expected = expected[chosen]  # of those that are not there anything
        if expected.shape[1] != self.found.groups:
            return np.zeros_like(there), there
        right = there & (self.found.values == expected).all(axis=1)
        return right, there & ~right


@dataclass(frozen=True, slots=True)
class Judged:
    """Keys and chain indices of blocks that are in now, indices of those that were wrong, and the
    bytes of the former."""

    keys: list[bytes]
    stored: list[int]
    corrupt: list[int]
    size_bytes: int


class Arrivals:
    """Mutable fields: `_open`, by put id; `_early`, who waits for one that is not open yet. Ends
    every move that it was given, once."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._open: dict[str, Arrival] = {}
        self._early: dict[str, anyio.Event] = {}

    def find(self, put_id: str) -> Arrival | None:
        return self._open.get(put_id)

    def open(self, put_id: str, arrival: Arrival) -> None:
        """Keep what comes until it is taken, given up or out of time."""
        assert put_id not in self._open
        self._open[put_id] = arrival
        early = self._early.pop(put_id, None)
        if early is not None:
            early.set()

    def ended(self, put_id: str, arrival: Arrival) -> None:
        """No bytes move any more: give up the slots that are not whole, or all if the put is
        over."""
        arrival.over.set()
        if self._open.get(put_id) is not arrival:
            self.discard(arrival)
        elif not arrival.found.whole.all():
            moves, found = arrival.moves, arrival.found
            whole = found.whole.tolist()
            lost = [move for move, is_whole in zip(moves, whole, strict=True) if not is_whole]
            arrival.moves = [move for move, is_whole in zip(moves, whole, strict=True) if is_whole]
            arrival.found = Sums(found.values[found.whole], found.whole[found.whole])
            self._index.end_moves(lost, [None] * len(lost))

    async def take(self, put_id: str, session: str, *, deadline_s: float) -> Arrival | None:
        """Return, once, what a writer's put has brought, when no bytes move any more; None when it
        is over.

        Two calls that were sent one after the other may be begun in either order: one that is not
        open is waited for, for a moment.
        """
        if put_id not in self._open:
            early = self._early.setdefault(put_id, anyio.Event())
            try:
                with anyio.move_on_after(min(EARLY_S, deadline_s)):
                    await early.wait()
            finally:
                self._early.pop(put_id, None)
        arrival = self._open.get(put_id)
        if arrival is None:
            return None
        if arrival.session != session:
            raise Invalid(f"put_commit: {put_id!r} is another writer's")
        with anyio.move_on_after(deadline_s):
            await arrival.over.wait()
        if not arrival.over.is_set() or self._open.get(put_id) is not arrival:
            return None
        return self._open.pop(put_id)

    def judge(self, arrival: Arrival, announced: Announced) -> Judged:
        """Show the blocks whose checksums are those that were announced, and end all moves."""
        right, wrong = arrival.judged(announced)
        moves, arrival.moves = arrival.moves, ()
        found: list[list[int] | None] = arrival.found.values.tolist()
        if not right.all():
            found = [each if ok else None for each, ok in zip(found, right.tolist(), strict=True)]
        stored = self._index.end_moves(moves, found)
        headers = [move.entry.header for move, is_in in zip(moves, stored, strict=True) if is_in]
        return Judged(
            keys=[header.key for header in headers],
            stored=[header.index for header in headers],
            corrupt=[moves[place].entry.header.index for place in np.flatnonzero(wrong).tolist()],
            size_bytes=len(headers) * moves[0].size if moves else 0,
        )

    def discard(self, arrival: Arrival) -> None:
        """End all moves of what nobody will vouch for: nothing has come."""
        moves, arrival.moves = arrival.moves, ()
        arrival.found = Sums.of(0, arrival.found.groups)
        self._index.end_moves(moves, [None] * len(moves))

    def give_up(self, put_ids: Iterable[str]) -> None:
        """These puts are over: what has come is discarded, what is coming when it has come."""
        for put_id in put_ids:
            arrival = self._open.pop(put_id, None)
            if arrival is not None and arrival.over.is_set():
                self.discard(arrival)

    def leave(self, session: str) -> None:
        """A writer is gone."""
        self.give_up([put_id for put_id, each in self._open.items() if each.session == session])

    def expire(self, now_s: float) -> None:
        """Give up what is over its time."""
        self.give_up([put_id for put_id, each in self._open.items() if each.ends_s <= now_s])
