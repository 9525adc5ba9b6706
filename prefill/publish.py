"""Pushing a job's blocks into the store as they become full, while the next chunk is computed."""

from __future__ import annotations

from typing import Protocol

import anyio

from kvass.common.pool.table import BlockTable
from kvass.common.wire import Prefill
from kvass.kvstore.client.store import StoreClient

PUSH_S = 10.0
# `full` is an answer: decode frees held blocks as it pulls them, so it is worth asking again for a
# while; then decode computes what is missing. `busy` means another writer is at it. So often a job
# may be refused all that it offers, one time after the other: then each block is offered once.
ATTEMPTS = 6
BACKOFF_S = 0.05  # doubled each time: 1.6 s in all


class Publishing(Protocol):
    """What is published: `prefill.job.Run`."""

    stored: set[int]

    def move(self) -> None: ...


class Publisher:
    """One job's queue of full blocks. Mutable fields: `refused` (why blocks are not stored, as far
    as they were offered), `_in_vain` (offers in a row of which nothing was stored), `_queued`,
    `_pushing`, `_wake`, `_idle`.

    The queue is bounded by the job's blocks; its slots stay in use by the job meanwhile.
    """

    def __init__(self, store: StoreClient, request: Prefill, table: BlockTable) -> None:
        self._store = store
        self._request = request
        self._table = table
        self.refused: dict[int, str] = {}
        self._in_vain = 0
        self._queued: list[int] = []
        self._pushing = False
        self._wake = anyio.Event()
        self._idle = anyio.Event()

    def publish(self, indices: list[int]) -> None:
        """Queue blocks whose KV is complete in the pool."""
        self._queued += indices
        self._wake.set()

    async def flush(self) -> None:
        """Wait until everything queued is stored or given up."""
        while self._queued or self._pushing:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def run(self, run: Publishing) -> None:
        """Push what is queued, all of it in one call, for ever."""
        while True:
            while self._queued:
                indices, self._queued = self._queued, []
                self._pushing = True
                await self._push(run, indices)
                self._pushing = False
            self._idle.set()
            await self._wake.wait()
            self._wake = anyio.Event()

    async def _push(self, run: Publishing, indices: list[int]) -> None:
        while True:
            result = await self._store.push(
                self._table.chain,
                indices,
                [self._table.slots[index] for index in indices],
                hold_owner=self._request.hold_owner or None,
                tenant=self._request.tenant,
                deadline_s=PUSH_S,
            )
            run.stored.update(result.stored)
            self.refused.update(result.refused)
            run.move()
            indices = sorted(result.refused)
            self._in_vain = 0 if result.stored else self._in_vain + 1
            if not indices or self._in_vain >= ATTEMPTS:
                return
            await anyio.sleep(BACKOFF_S * 2 ** max(self._in_vain - 1, 0))
