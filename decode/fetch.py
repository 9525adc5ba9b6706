"""Pulling a request's prompt blocks from the store, while a prefill job may still be writing them.

Whatever goes wrong here is a miss: the block is computed in the batch instead. A block that could
not be pulled once is not tried again for this request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import anyio
from anyio import Event

from kvass.common.costs import Costs
from kvass.common.keys import Chain, indices_of, ranges_of
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Range
from kvass.kvstore.client.store import StoreClient

LOOKUP_S = 2.0  # a node that does not answer in this time is a miss; the client counts it
PULL_S = 10.0
WAIT_S = 5.0  # a wait is asked again after this: nodes come and go


class Ticket(Protocol):
    """What fetching needs of a request. `prefill_over` is set when no more blocks will come; until
    then `on_settled` hears of those that were there and are not pulled again, be they here now or
    not: others may need their places in the store."""

    @property
    def on_settled(self) -> Callable[[Collection[int]], None]: ...

    @property
    def table(self) -> BlockTable: ...

    @property
    def prefill_over(self) -> Event: ...


class Fetcher:
    """Pulls blocks for any number of requests. Mutable fields: `_in_flight` (keys being pulled,
    with an event that is set when their pull ends)."""

    def __init__(self, store: StoreClient, costs: Costs, block_size: int) -> None:
        self._store = store
        self._costs = costs
        self._block_size = block_size
        self._in_flight: dict[bytes, Event] = {}

    async def fetch(self, ticket: Ticket, wake: Callable[[], None]) -> None:
        """Fill the table from the store as far as it has blocks; returns when no more will come.
        `wake` is called when a block came out of the own pool: its slot is spared, and another
        request may find room.

        The caller keeps the table open meanwhile; after cancellation no transfer into it is left.
        """
        table = ticket.table
        failed: set[int] = set()
        while True:
            is_last_look = ticket.prefill_over.is_set()
            wanted = [index for index in table.missing if index not in failed]
            lacking = [index for index in wanted if not table.share(index)]
            if len(lacking) < len(wanted):
                wake()
            wanted = lacking
            if not wanted:
                if is_last_look or not table.missing:
                    return
                await ticket.prefill_over.wait()
                continue
            visible = await self._visible(ticket, wanted)
            if visible:
                ours, landed = await self._pull(ticket, visible)
                failed |= ours - landed
                if ours and not ticket.prefill_over.is_set():
                    ticket.on_settled(ours)
            elif is_last_look:
                return

    async def _visible(self, ticket: Ticket, wanted: list[int]) -> list[int]:
        """Return which blocks the store has: now, or as soon as prefill has written one."""
        chain, ranges = ticket.table.chain, ranges_of(wanted)
        if ticket.prefill_over.is_set():
            return indices_of(
                await self._store.lookup(chain, ranges, deadline_s=LOOKUP_S, again=True)
            )
        visible: list[Range] = []
        async with anyio.create_task_group() as tasks:

            async def stop_waiting() -> None:
                await ticket.prefill_over.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop_waiting)
            result = await self._store.wait(chain, ranges, until="visible", deadline_s=WAIT_S)
            visible = list(result.visible)
            tasks.cancel_scope.cancel()
        return indices_of(visible)

    async def _pull(self, ticket: Ticket, indices: list[int]) -> tuple[set[int], set[int]]:
        """Pull blocks where that pays, or wait for another request's pull of them; return those
        that were this request's to pull, and those of them that came."""
        table = ticket.table
        ours = [i for i in indices if table.chain.keys[i] not in self._in_flight]
        if not ours:
            await self._in_flight[table.chain.keys[indices[0]]].wait()
            return set(), set()
        worth = [low for low in ranges_of(ours) if self._pays(low, table.block_tokens)]
        size = table.block_tokens
        chosen = [index for index in indices_of(worth) if table.grow((index + 1) * size)]
        if not chosen:
            return set(ours), set()
        ended = Event()
        for index in chosen:
            self._in_flight[table.chain.keys[index]] = ended
        try:
            landed = await self._transfer(table.chain, chosen, [table.slots[i] for i in chosen])
            for index in landed:
                table.landed(index)
        finally:
            for index in chosen:
                del self._in_flight[table.chain.keys[index]]
            ended.set()
        return set(ours), landed

    def _pays(self, blocks: Range, block_tokens: int) -> bool:
        count = blocks[1] - blocks[0]
        return self._costs.loading_pays(count * self._block_size, count * block_tokens)

    async def _transfer(self, chain: Chain, indices: list[int], slots: list[int]) -> set[int]:
        started_s = anyio.current_time()
        with self._costs.pulling():
            landed = await self._store.pull(chain, indices, slots, deadline_s=PULL_S)
            self._costs.pulled(len(landed) * self._block_size, anyio.current_time() - started_s)
        return landed
