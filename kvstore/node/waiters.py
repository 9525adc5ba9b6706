"""Tasks that wait for news of blocks. It refuses to know what the news is: who is woken looks
again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import anyio


class Waiters:
    """Mutable field: `_events`, by key: the tasks that want to hear of it."""

    def __init__(self) -> None:
        self._events: dict[bytes, set[anyio.Event]] = {}

    def __len__(self) -> int:
        return len(self._events)

    @contextmanager
    def watch(self, keys: Iterable[bytes]) -> Iterator[anyio.Event]:
        """Give an event that news of any of `keys` sets. Look at the blocks only after this."""
        event = anyio.Event()
        watched = list(keys)
        for key in watched:
            self._events.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            for key in watched:
                events = self._events[key]
                events.discard(event)
                if not events:
                    del self._events[key]

    def wake(self, keys: Iterable[bytes]) -> None:
        """Set the events of all who watch one of `keys`."""
        for key in keys:
            for event in self._events.get(key, ()):
                event.set()
