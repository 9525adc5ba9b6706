"""Blocks that somebody is about to read, kept in memory until then."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvass.kvstore.index.ledger import Entry, Ledger


class Keeping:
    """Leases on blocks that come into memory one after the other; `with` ends them all.

    What comes takes the room of what is worth the least, and those are the blocks that nobody has
    read yet: without leases the later ones of a get would drive out its first ones.

    Mutable fields: `_entries` (that are leased), `_is_over`."""

    def __init__(self, ledger: Ledger, notify: Callable[[], None]) -> None:
        self._ledger = ledger
        self._notify = notify
        self._entries: list[Entry] = []
        self._is_over = False

    def add(self, entries: Iterable[Entry]) -> None:
        """Keep visible blocks, too, if this has not ended."""
        if not self._is_over:
            entries = list(entries)
            self._ledger.lease(entries)
            self._entries += entries

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        entries, self._entries = self._entries, []
        for entry in entries:
            self._ledger.unlease(entry)
        if entries:
            self._notify()
