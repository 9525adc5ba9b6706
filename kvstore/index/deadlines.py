"""What ends when, for things whose end can be moved: leases, claims, holds, puts. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


class Deadlines(Generic[Name]):
    """Names by the time they run out. Mutable fields: `_heap`, `_known`.

    `ends_s` tells a name's present end, or None when it is gone. A renewal needs no call: a name
    that comes up early is looked up and put back.
    """

    def __init__(self, ends_s: Callable[[Name], float | None]) -> None:
        self._ends_s = ends_s
        self._heap: list[tuple[float, int, Name]] = []
        self._known: set[Name] = set()
        self._count = 0

    def add(self, name: Name, ends_s: float) -> None:
        """Watch a name; a name that is watched already only has its end looked up later."""
        if name not in self._known:
            self._known.add(name)
            self._push(name, ends_s)

    def due(self, now_s: float) -> Iterator[Name]:
        """Yield every name whose end is not after `now_s`; it is watched no more."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, name = heapq.heappop(self._heap)
            ends_s = self._ends_s(name)
            if ends_s is not None and ends_s > now_s:
                self._push(name, ends_s)
                continue
            self._known.discard(name)
            if ends_s is not None:
                yield name

    def _push(self, name: Name, ends_s: float) -> None:
        self._count += 1  # names need no order of their own
        heapq.heappush(self._heap, (ends_s, self._count, name))
