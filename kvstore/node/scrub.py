"""A node reads what it holds, slowly and for ever, and drops what is not what was stored.

    a pass    every block that was visible when it began ─> leased, hashed, right or dropped
    its pace  the whole slab in `scrub_s`, however full it is: a block of s bytes, then a pause of
              scrub_s · s ÷ slab bytes

Readers check every block that they get, so a wrong byte is never served with or without it; it
finds memory that goes bad while nobody reads, says so, and makes room for the right block. Hashing
runs in the copy threads, one block at a time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import anyio

from kvass.kvstore.node.chores import AGAIN_S, survived
from kvass.kvstore.node.state import NodeState

_log = logging.getLogger(__name__)

IDLE_S = 60.0  # between two looks at a node that holds nothing


@dataclass(slots=True)
class Scrubber:
    """Mutable fields: `size_bytes` and `blocks` read so far, `found` (blocks that were wrong),
    `passes` over all that was there."""

    state: NodeState
    scrub_s: float
    size_bytes: int = 0
    blocks: int = 0
    found: int = 0
    passes: int = 0

    def counts(self) -> dict[str, int]:
        return {
            "scrubbed_bytes": self.size_bytes,
            "scrubbed_blocks": self.blocks,
            "scrub_found": self.found,
            "scrub_passes": self.passes,
        }

    async def run(self) -> None:
        """Read everything, again and again, until cancelled; nothing when `scrub_s` is 0."""
        while self.scrub_s:
            entries = self.state.index.ledger.entries.values()
            keys = [entry.header.key for entry in entries if entry.state == "visible"]
            for key in keys:
                pause_s = AGAIN_S
                with survived("the scrub", self.state.faults):
                    pause_s = self._pause_s(await self._look(key))
                await anyio.sleep(pause_s)
            self.passes += bool(keys)
            if not keys:
                await anyio.sleep(min(IDLE_S, self.scrub_s))

    def _pause_s(self, size_bytes: int) -> float:
        return self.scrub_s * size_bytes / self.state.index.ledger.extents.total

    async def _look(self, key: bytes) -> int:
        """Check one block, if it is still there; return its bytes."""
        index = self.state.index
        entry = index.ledger.visible(key)
        if entry is None:
            return 0
        index.ledger.lease([entry])
        try:
            right = await self.state.deliveries.is_right(entry)
        finally:
            index.ledger.unlease(entry)
        self.size_bytes += entry.slot.size
        self.blocks += 1
        if not right:
            self.found += 1
            _log.error(
                "scrub: block %s is corrupt, dropped; when it is not the only one, this host's "
                "memory fails",
                key.hex(),
            )
            index.found_corrupt(entry, self.state.now_s())
        self.state.notify()
        return entry.slot.size
