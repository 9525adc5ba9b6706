"""How many choices this process has at the workers at once, and who waits here meanwhile.

    comes ──room at the workers──> in service ──> ends
      │ none                            ^
      v                                 │ a turn, fairly by tenant (`fair.py`)
    waits here, bounded ────────────────┘

What waits at a worker waits in the order in which it came, whoever's it is. So no more is handed
over than the workers' batches hold twice: a tenant that asks for much waits here, and not before
the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from kvass.common import errors
from kvass.gateway.fair import FairQueue

# Choices in flight in this process. One connection carries 1,024 calls, and each choice is one.
CHOICES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Room:
    """How many choices may be at the workers, and how many in all, with those that wait here."""

    served: int
    choices: int


@dataclass(slots=True, eq=False)
class _Turn:
    """Mutable fields: both. It has `come`, or been refused, for somebody else's sake."""

    news: anyio.Event = field(default_factory=anyio.Event)
    come: bool = False


@dataclass(slots=True, eq=False)
class Admission:
    """Mutable fields: `queue`, `served` (choices that are at the workers) and `_turns` of those
    that wait or are served, by their numbers in the queue."""

    choices_max: int = CHOICES_MAX
    queue: FairQueue = field(default_factory=FairQueue)
    served: int = 0
    _turns: dict[int, _Turn] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """How many choices are here: served, and waiting."""
        return self.served + self.queue.cost

    @asynccontextmanager
    async def admit(
        self, tenant: str, choices: int, room: Callable[[], Room | None], *, wait_s: float
    ) -> AsyncIterator[None]:
        """Wait until an answer's choices may go to the workers, and count them while it lasts.

        `room` returns None while nothing is known of the workers. Raises Overloaded where too many
        are here, also while it waits, and DeadlineExceeded after `wait_s`.
        """
        self._make_room(tenant, choices, room())
        one, turn = self.queue.add(tenant, choices), _Turn()
        self._turns[one.number] = turn
        try:
            self._hand_out(room())
            with anyio.move_on_after(wait_s):
                await turn.news.wait()
            if not turn.news.is_set():
                raise errors.DeadlineExceeded(f"its turn had not come after {wait_s:.0f} s")
            if not turn.come:
                raise errors.Overloaded(
                    "it made room for others: of this tenant most requests are waiting"
                )
            yield
        finally:
            del self._turns[one.number]
            if turn.come:
                self.served -= choices
            elif not turn.news.is_set():
                self.queue.remove(one)
            self._hand_out(room())
            if not self.choices:
                self.queue.rest()

    def _make_room(self, tenant: str, choices: int, room: Room | None) -> None:
        """Refuse who waits and has the most, or raise Overloaded where that is this tenant."""
        most = self.choices_max if room is None else min(room.choices, self.choices_max)
        while self.choices and self.choices + choices > most:
            other = self.queue.crowded_out(tenant, choices)
            if other is None:
                raise errors.Overloaded(
                    f"{self.choices} answers are in flight here; at most {most} may be"
                )
            self.queue.remove(other)
            self._turns[other.number].news.set()

    def _hand_out(self, room: Room | None) -> None:
        """Give out turns as far as there is room; one at least where nobody is served."""
        most = self.choices_max if room is None else room.served
        while (one := self.queue.first()) is not None:
            # One that is wider than half of the room begins when half is free: if it waited for
            # all of it, places would stand empty, and others wait behind it.
            if self.served and self.served + min(one.cost, max(most // 2, 1)) > most:
                return
            self.queue.serve(one)
            self.served += one.cost
            turn = self._turns[one.number]
            turn.come = True
            turn.news.set()
