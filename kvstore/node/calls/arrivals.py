"""Bytes of puts that come, or have come, and that nobody has vouched for yet.

A same-host writer's bytes are read as soon as it has a place for them, while it computes the
checksums that its commit brings. Until then they lie in slots that nobody can read, and each slot's
move goes on: so whatever ends a put, its slots are free only when their bytes have stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import anyio

from kvass.common.errors import Invalid
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Move

EARLY_S = 0.25  # how long a commit waits for the begin that was sent before it


@dataclass(slots=True, eq=False)
class Arrival:
    """One put's blocks by key. Mutable fields: `moves` that have not ended, `found` (checksums of
    what is in the slots), `taken_s` (how long it took), `over` (no bytes move any more)."""

    session: str
    ends_s: float
    moves: dict[bytes, Move]
    found: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    taken_s: float = 0.0
    over: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class Judged:
    """Mutable fields: keys and chain indices of blocks that are visible now or were wrong, and the
    bytes of the former."""

    keys: list[bytes] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    size_bytes: int = 0


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
        is_open = self._open.get(put_id) is arrival
        lost = [key for key in arrival.moves if not (is_open and key in arrival.found)]
        self._end(arrival, lost)

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

    def judge(self, arrival: Arrival, announced: Mapping[bytes, tuple[int, ...]]) -> Judged:
        """Show the blocks whose checksums are those that were announced, and end all moves."""
        judged = Judged()
        for key, move in arrival.moves.items():
            found, expected = arrival.found.get(key), announced.get(key)
            index = move.entry.header.index
            if found is None or found != expected:
                self._index.end_move(move, None)
                if found is not None and expected is not None:
                    judged.corrupt.append(index)
            elif self._index.end_move(move, found):
                judged.keys.append(key)
                judged.stored.append(index)
                judged.size_bytes += move.size
        arrival.moves.clear()
        return judged

    def give_up(self, put_ids: Iterable[str]) -> None:
        """These puts are over: what has come is discarded, what is coming when it has come."""
        for put_id in put_ids:
            arrival = self._open.pop(put_id, None)
            if arrival is not None and arrival.over.is_set():
                self._end(arrival, list(arrival.moves))

    def leave(self, session: str) -> None:
        """A writer is gone."""
        self.give_up([put_id for put_id, each in self._open.items() if each.session == session])

    def expire(self, now_s: float) -> None:
        """Give up what is over its time."""
        self.give_up([put_id for put_id, each in self._open.items() if each.ends_s <= now_s])

    def _end(self, arrival: Arrival, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._index.end_move(arrival.moves.pop(key), None)
