"""Offering blocks that decode computed to the store, in the background.

So the next turn of a conversation hits on any worker. An offer is never waited for by a request,
and losing one costs a recomputation at worst: when the queue is full, offers are dropped and
counted, as blocks that were refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from kvass.common.keys import Chain
from kvass.common.pool.pool import BlockPool
from kvass.kvstore.client.store import StoreClient

OFFERS_QUEUED = 64  # 8 blocks each: at most 512 retained slots
PUSH_S = 5.0


@dataclass(frozen=True, slots=True)
class Offer:
    """Named blocks of one chain; their slots are retained until the offer is done."""

    chain: Chain
    indices: tuple[int, ...]
    slots: tuple[int, ...]
    tenant: str


class Offerer:
    """A bounded queue of offers and the task that pushes them.

    `on_release` tells that slots came back: somebody may wait for them. Mutable fields:
    `on_release` (set once, by the loop), `dropped_count`.
    """

    def __init__(self, store: StoreClient, pool: BlockPool) -> None:
        self._store = store
        self._pool = pool
        self._send, self._receive = anyio.create_memory_object_stream[Offer](OFFERS_QUEUED)
        self.on_release: Callable[[], None] = lambda: None
        self.dropped_count = 0

    def offer(self, chain: Chain, indices: list[int], slots: list[int], tenant: str) -> None:
        """Queue blocks; `slots` must be in use by the caller while this runs."""
        for slot in slots:
            self._pool.retain(slot)
        try:
            self._send.send_nowait(Offer(chain, tuple(indices), tuple(slots), tenant))
        except (anyio.WouldBlock, anyio.ClosedResourceError):  # full; or the worker is stopping
            self._pool.release(slots)
            self.dropped_count += len(slots)

    async def run(self) -> None:
        """Push offers, one after the other, for ever."""
        with self._send, self._receive:
            async for offer in self._receive:
                try:
                    await self._store.push(
                        offer.chain,
                        offer.indices,
                        offer.slots,
                        hold_owner=None,
                        tenant=offer.tenant,
                        deadline_s=PUSH_S,
                    )
                finally:
                    self._pool.release(offer.slots)
                    self.on_release()
