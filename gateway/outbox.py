"""Deltas on their way from workers to one client. Never blocks the workers' side.

A client that reads slowly gets fewer, longer pieces: what waits is bounded by what its choices may
generate, and no worker's connection is held for it. It refuses to know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from kvass.common.wire import Delta
from kvass.gateway.replies import Piece


class Outbox:
    """Collects what is new of each choice until somebody takes it.

    Mutable fields: `_pending` by choice, `_wake`, `_closed`. `on_delta` is called with each delta
    as it comes, for those who measure.
    """

    def __init__(self, on_delta: Callable[[int, Delta], None]) -> None:
        self._on_delta = on_delta
        self._pending: dict[int, Piece] = {}
        self._wake = anyio.Event()
        self._closed = False

    def put(self, choice: int, delta: Delta) -> None:
        """Add to one choice's text."""
        self._on_delta(choice, delta)
        piece = self._pending.setdefault(choice, Piece(choice))
        piece.text += delta.text
        piece.tokens += len(delta.token_ids)
        piece.finish_reason = piece.finish_reason or delta.finish_reason
        piece.stop_reason = delta.stop_reason if piece.stop_reason == "" else piece.stop_reason
        self._wake.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[Piece]:
        """Wait for something new and take all of it; nothing, once it is closed and empty."""
        while not self._pending and not self._closed:
            await self._wake.wait()
            self._wake = anyio.Event()
        taken, self._pending = list(self._pending.values()), {}
        return taken


@dataclass(frozen=True, slots=True)
class Shifted:
    """The part of an outbox that belongs to one prompt of several."""

    outbox: Outbox
    first: int

    def put(self, choice: int, delta: Delta) -> None:
        """Add to the text of the prompt's `choice`."""
        self.outbox.put(self.first + choice, delta)
