"""A store node without its listener: its calls on the wire, and the clock that ends what runs out.

The index decides, deliveries move bytes. State changes are made in the index synchronously, before
and after every await, so its conservation law holds at each suspension. It refuses to know about
membership and sockets: `service.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from kvass.common.block import BlockHeader
from kvass.common.clock import Clock
from kvass.common.errors import Invalid
from kvass.common.executor import Executor
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.deliveries import Deliveries
from kvass.kvstore.get_calls import GetCalls
from kvass.kvstore.index import Index
from kvass.kvstore.node_state import NodeState, check_own, chosen, ranges, request_of
from kvass.kvstore.put_calls import PutCalls
from kvass.kvstore.slab import Slab

# What runs out while nobody calls is noticed this late at most: short beside a claim, and the cost
# of looking is not measurable.
TICK_S = 0.1


class Node:
    """One store node: wire its `handlers` and `on_leave` into an RPC server, and `run` it."""

    def __init__(
        self, index: Index, slab: Slab, endpoints: Endpoints, executor: Executor, clock: Clock
    ) -> None:
        deliveries = Deliveries(slab, endpoints, executor)
        self._state = NodeState(index, deliveries, endpoints, clock)
        self._puts = PutCalls(self._state)
        self._gets = GetCalls(self._state)

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {
            m.Attach: self._attach,
            m.Lookup: self._lookup,
            m.Claim: self._claim,
            m.ReleaseClaims: self._release_claims,
            m.Wait: self._wait,
            m.ReleaseHold: self._release_hold,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Drop: self._drop,
            m.Stats: self._stats,
            m.Drain: self._drain,
            **self._puts.handlers(),
            **self._gets.handlers(),
        }

    async def run(self) -> None:
        """End what runs out, until cancelled."""
        while True:
            await anyio.sleep(TICK_S)
            self._state.index.expire(self._state.now_s())
            self._puts.expire(self._state.now_s())
            self._state.notify()

    async def on_leave(self, peer: Hello) -> None:
        """A peer's connection has ended: what it had begun to put is given up now."""
        self._puts.leave(peer.start_id)

    def drain(self) -> None:
        """Take no more puts and claims."""
        self._state.index.draining = True

    def counts(self) -> dict[str, int]:
        """Return the index's counts, the landing memory's, and failed transfers by kind."""
        state = self._state
        state.index.expire(state.now_s())
        landing = state.endpoints.landing.counts()
        return {
            **state.index.counts(),
            **{f"landing_{name}_bytes": size for name, size in landing.items()},
            **state.faults,
            "waited_blocks": len(state.waiters),
            "draining": int(state.index.draining),
        }

    async def _attach(self, call: Call) -> m.Attached:
        card = request_of(call, m.Attach).card
        check_own(call, card.start_id, "the card")
        way = await self._state.endpoints.way_to(card)
        self._puts.attached(card.start_id, way)
        return m.Attached(card=self._state.endpoints.card(), put_way=way)

    async def _lookup(self, call: Call) -> m.Blocks:
        keys = m.named(request_of(call, m.Lookup).spans)
        found = self._state.index.lookup(list(keys.values()), self._state.now_s())
        self._state.notify()
        return m.Blocks(visible=ranges(i for i, here in zip(keys, found, strict=True) if here))

    async def _claim(self, call: Call) -> m.Claimed:
        request = request_of(call, m.Claim)
        keys = m.named(request.spans)
        now_s = self._state.now_s()
        verdicts = self._state.index.claim(request.owner, list(keys.values()), now_s)
        self._state.notify()
        answers = dict(zip(keys, verdicts, strict=True))
        return m.Claimed(
            granted=chosen(answers, "granted"),
            visible=chosen(answers, "visible"),
            taken=chosen(answers, "busy"),
        )

    async def _release_claims(self, call: Call) -> Done:
        owner = request_of(call, m.ReleaseClaims).owner
        self._state.index.release_claims(owner, self._state.now_s())
        self._state.notify()
        return Done()

    async def _wait(self, call: Call) -> m.Waited:
        request = request_of(call, m.Wait)
        indices = {key: index for index, key in m.named(request.spans).items()}
        with anyio.move_on_after(request.deadline_s):
            while True:
                with self._state.waiters.watch(indices) as news:
                    visible, unclaimed = self._state.index.status(indices, self._state.now_s())
                    if visible or (unclaimed and request.until == "settled"):
                        return m.Waited(
                            visible=ranges(indices[key] for key in visible),
                            unclaimed=ranges(indices[key] for key in unclaimed),
                        )
                    await news.wait()
        return m.Waited(visible=(), unclaimed=())

    async def _release_hold(self, call: Call) -> Done:
        self._state.index.release_hold(request_of(call, m.ReleaseHold).owner, self._state.now_s())
        self._state.notify()
        return Done()

    async def _pin(self, call: Call) -> m.Blocks:
        request = request_of(call, m.Pin)
        keys = m.named(request.spans)
        now_s = self._state.now_s()
        ends_s = now_s + request.duration_s
        pinned = self._state.index.pin(request.owner, list(keys.values()), ends_s, now_s)
        self._state.notify()
        return m.Blocks(visible=ranges(i for i, done in zip(keys, pinned, strict=True) if done))

    async def _unpin(self, call: Call) -> Done:
        self._state.index.unpin(request_of(call, m.Unpin).owner, self._state.now_s())
        self._state.notify()
        return Done()

    async def _drop(self, call: Call) -> m.Dropped:
        request = request_of(call, m.Drop)
        by_field = (request.namespace, request.tenant, request.writer)
        if request.keys is None and by_field == (None, None, None):
            raise Invalid("drop: give a namespace, a tenant, a writer or keys")
        chosen_keys = None if request.keys is None else set(request.keys)

        def matches(header: BlockHeader) -> bool:
            fields = (header.namespace, header.tenant, header.writer)
            return (chosen_keys is None or header.key in chosen_keys) and all(
                asked is None or asked == value
                for asked, value in zip(by_field, fields, strict=True)
            )

        blocks = self._state.index.drop(matches, self._state.now_s())
        self._state.notify()
        return m.Dropped(blocks=blocks)

    async def _stats(self, call: Call) -> m.StatsReply:
        counts = self.counts()
        self._state.notify()
        return m.StatsReply(counts=counts)

    async def _drain(self, call: Call) -> Done:
        self.drain()
        return Done()
