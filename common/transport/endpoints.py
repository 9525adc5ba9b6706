"""All transports of one process, and which one reaches whom.

    same host, the kernel allows it:  `reader.read` out of the peer's memory
    else:                             lend from `landing`, the peer does `writer.write`

Only this module decides that; its users hold an `Endpoints` and never name a library. The
simulation makes the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvass.common.transport.identity import Identity
from kvass.common.transport.route import Setting, Way, choose
from kvass.common.transport.seam import AttachRefused, EndpointCard, Landing, Transport

_log = logging.getLogger(__name__)

REFUSALS_MAX = 4_096  # start ids remembered; a cluster's restarts between two of ours


@dataclass
class Endpoints:
    """What a process moves bytes with. Mutable field: `_refused`, start ids that TCP must reach.

    `reader` is None when the setting is `tcp`.
    """

    identity: Identity
    setting: Setting
    reader: Transport | None
    writer: Transport
    landing: Landing
    close: Callable[[], None]
    _refused: dict[str, str] = field(default_factory=dict)

    def card(self) -> EndpointCard:
        """Return the card that a peer passes to its `way_to`."""
        return (self.reader or self.writer).card()

    async def way_to(self, card: EndpointCard) -> Way:
        """Return how bytes come here from the peer of `card`: `read` them (the peer is attached),
        or lend a landing buffer and ask the peer to `write`.

        The first answer for a peer is found by trying, and kept. Raises Unavailable when the
        setting forbids the only way that is left.
        """
        same_host = card.host_id == self.identity.host_id and card.kind != "tcp"
        if self.reader is not None and same_host and card.start_id not in self._refused:
            try:
                await self.reader.attach(card)
            except AttachRefused as error:
                self._remember(card.start_id, str(error))
        refused = card.start_id in self._refused
        return choose(self.setting, same_host=same_host, refused=refused)

    def _remember(self, start_id: str, reason: str) -> None:
        if len(self._refused) >= REFUSALS_MAX:
            del self._refused[next(iter(self._refused))]
        self._refused[start_id] = reason
        _log.warning("transport: its memory cannot be read, TCP instead: %s", reason)
