"""How many connections a listener has at once: those of peers that have proved who they are, and
strangers, who have not yet.

A stranger costs little and is here for seconds; where there are too many, the one that has been
here longest makes room, so that connections that say nothing keep no member out. It refuses to know
what a handshake is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from kvass.common.errors import Overloaded
from kvass.common.pacing import Pacing

_log = logging.getLogger(__name__)

STRANGERS_MAX = 128  # a thousand members that come at once take turns of a millisecond each
PEERS_MAX = 4096  # a few connections of each of a thousand members
TELL_EVERY_S = 10.0  # whoever is refused comes again and again: the log has a line now and then


class Door:
    """Counts one listener's connections.

    Mutable fields: `_strangers` (the longest here first), `peers`, `_pacing` (of refusals' lines).
    """

    def __init__(self) -> None:
        self._strangers: dict[anyio.CancelScope, None] = {}
        self.peers = 0
        self._pacing = Pacing(TELL_EVERY_S)

    @property
    def strangers(self) -> int:
        return len(self._strangers)

    @contextmanager
    def stranger(self) -> Iterator[None]:
        """Let a connection in that has proved nothing yet; others may end it to make room."""
        if len(self._strangers) >= STRANGERS_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        with anyio.CancelScope() as scope:
            self._strangers[scope] = None
            try:
                yield
            finally:
                self._strangers.pop(scope, None)

    @contextmanager
    def peer(self) -> Iterator[None]:
        """Count a peer's connection; raises Overloaded where there are too many."""
        if self.peers >= PEERS_MAX:
            raise Overloaded(f"{PEERS_MAX} connections are open here", retry_after_s=TELL_EVERY_S)
        self.peers += 1
        try:
            yield
        finally:
            self.peers -= 1

    def tell(self, reason: Callable[[], str]) -> None:
        """Log why a connection was refused, unless another one's reason was logged just now."""
        more = self._pacing.more(anyio.current_time())
        if more is not None:
            _log.warning("refused a connection from %s%s", reason(), more)
