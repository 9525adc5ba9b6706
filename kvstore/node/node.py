"""A store node without its listener: its calls on the wire, and the clock that ends what runs out.

The index decides, deliveries move bytes. State changes are made in the index synchronously, before
and after every await, so its conservation law holds at each suspension. It refuses to know about
membership and sockets: `service.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from heapq import nlargest

import anyio
import anyio.abc

from kvass.common.block import BlockHeader
from kvass.common.clock import Clock
from kvass.common.errors import Invalid, Unavailable
from kvass.common.executor import Executor
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Verdict
from kvass.kvstore.node.deliveries import Deliveries
from kvass.kvstore.node.fills import Filler
from kvass.kvstore.node.get_calls import GetCalls
from kvass.kvstore.node.handover import Handover
from kvass.kvstore.node.heat import Heat
from kvass.kvstore.node.put_calls import PutCalls
from kvass.kvstore.node.scrub import Scrubber
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import Moved, NodeState, check_own, chosen, ranges, request_of
from kvass.kvstore.node.tiers import Tiers
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.router import Router

_log = logging.getLogger(__name__)

# What runs out while nobody calls is noticed this late at most: short beside a claim, and the cost
# of looking is not measurable.
TICK_S = 0.1
_VISIBLE: Verdict = "visible"


class Node:
    """One store node: wire its `handlers` and `on_leave` into an RPC server, and `run` it.

    `router` leads to the cluster's other nodes. Mutable fields: `_draining` and `_drained`,
    set when a drain begins and when it has handed over what it could.
    """

    def __init__(
        self,
        member_id: str,
        index: Index,
        slab: Slab,
        endpoints: Endpoints,
        executor: Executor,
        clock: Clock,
        router: Router,
        tasks: anyio.abc.TaskGroup,
        *,
        scrub_s: float = 0.0,
    ) -> None:
        deliveries = Deliveries(slab, endpoints, executor)
        self._state = NodeState(index, deliveries, endpoints, clock)
        self._puts = PutCalls(self._state)
        self._gets = GetCalls(self._state)
        self._heat = Heat()
        self._filler = Filler(self._state, slab, router, executor, tasks)
        self._handover = Handover(member_id, self._state, router)
        self._scrubber = Scrubber(self._state, scrub_s)
        self._state.on_stored = self._handover.committed
        self._tasks = tasks
        self._slab = slab
        self._tiers: Tiers | None = None
        self._flash_lost = ""
        self._draining = anyio.Event()
        self._drained = anyio.Event()

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Take in who the cluster's store nodes are now, this one among them."""
        self._handover.set_nodes(nodes)

    def add_flash(self, log: FlashLog, writer: Executor, readers: Executor) -> None:
        """Use a second tier, before `run`."""
        self._tiers = Tiers(self._state, self._slab, log, writer, readers, self._tasks)
        self._state.rise = self._tiers.rise
        self._state.on_asked = self._tiers.asked
        self._handover.below = self._tiers.brought_up

    def lose_flash(self, why: str) -> None:
        """Go on with one tier where there should be two: say so, and that nothing erases the
        other."""
        self._flash_lost = why

    def watch(self, moved: Moved) -> None:
        """Tell of every put, get and fill that moved bytes."""
        self._state.on_moved = moved

    def handlers(self) -> Mapping[type[Message], Handler]:
        """Return what an RPC server answers."""
        return {
            m.Attach: self._attach,
            m.Lookup: self._lookup,
            m.Stage: self._stage,
            m.Claim: self._claim,
            m.ReleaseClaims: self._release_claims,
            m.Wait: self._wait,
            m.ReleaseHold: self._release_hold,
            m.Pin: self._pin,
            m.Unpin: self._unpin,
            m.Drop: self._drop,
            m.Bar: self._bar,
            m.Stats: self._stats,
            m.Drain: self._drain,
            **self._puts.handlers(),
            **self._gets.handlers(),
            **self._filler.handlers(),
        }

    async def run(self) -> None:
        """End what runs out, take copies and offer them, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._filler.run)
            tasks.start_soon(self._handover.run)
            tasks.start_soon(self._scrubber.run)
            if self._tiers is not None:
                tasks.start_soon(self._tiers.run)
            while True:
                await anyio.sleep(TICK_S)
                self._state.index.expire(self._state.now_s())
                self._puts.expire(self._state.now_s())
                self._state.notify()

    async def on_leave(self, peer: Hello) -> None:
        """A peer's connection has ended: what it had begun to put is given up now."""
        self._puts.leave(peer.start_id)

    def drain(self) -> None:
        """Take no more puts and claims, and hand over what others lack. Once is enough."""
        if not self._state.index.draining:
            self._state.index.draining = True
            self._draining.set()
            self._tasks.start_soon(self._leave)

    async def draining(self) -> None:
        """Wait until somebody wants this node to leave."""
        await self._draining.wait()

    async def drained(self) -> int:
        """Wait until a drain is over; return how many copies nobody has taken."""
        await self._drained.wait()
        return self._handover.left

    async def _leave(self) -> None:
        left = await self._handover.leave()
        self._drained.set()
        begun = self._handover.offered
        if left:
            _log.warning("drained, but %d of %d blocks found no taker", left, begun)
        else:
            _log.info("drained: others have all %d blocks; this node may be stopped", begun)

    def counts(self) -> dict[str, int]:
        """Return the index's counts, the landing memory's, and failed transfers by kind."""
        state = self._state
        state.index.expire(state.now_s())
        landing = state.endpoints.landing.counts()
        return {
            **state.index.counts(),
            **{f"landing_{name}_bytes": size for name, size in landing.items()},
            **state.faults,
            **self._filler.counts(),
            **self._handover.counts(),
            **self._scrubber.counts(),
            **self._flash_counts(),
            "hot_segments": self._heat.hot(),
            "waited_blocks": len(state.waiters),
            "draining": int(state.index.draining),
            "drained": int(self._drained.is_set()),
        }

    def _flash_counts(self) -> dict[str, int]:
        """Return the second tier's counts; with `hits` and `misses`, which it changes."""
        if self._tiers is None:
            return {"flash_off": 1} if self._flash_lost else {}
        totals = self._tiers.totals()
        found, index = totals["flash_hits"], self._state.index
        return {**totals, "hits": index.hits + found, "misses": index.misses - found}

    def tenants(self) -> list[m.TenantUse]:
        """Return what the tenants have that have the most, the largest first."""
        index = self._state.index
        most = nlargest(m.TENANTS_SHOWN, index.usage().items(), key=lambda each: each[1].size_bytes)
        quota = index.limits.allotments.quota
        return [m.TenantUse(name, use.size_bytes, use.blocks, quota(name)) for name, use in most]

    async def _attach(self, call: Call) -> m.Attached:
        card = request_of(call, m.Attach).card
        check_own(call, card.start_id, "the card")
        way = await self._state.endpoints.way_to(card)
        self._puts.attached(card.start_id, way)
        return m.Attached(card=self._state.endpoints.card(), put_way=way)

    async def _lookup(self, call: Call) -> m.Blocks:
        spans = request_of(call, m.Lookup).spans
        keys = m.named(spans)
        found = self._state.index.lookup(list(keys.values()), self._state.now_s())
        self._state.notify()
        here = {i for i, is_here in zip(keys, found, strict=True) if is_here}
        if self._tiers is not None:
            self._tiers.asked([keys[i] for i in here])
        below = self._below([key for i, key in keys.items() if i not in here])
        if self._tiers is not None:
            self._tiers.counts["hits"] += len(below)
        on_flash = {i for i, key in keys.items() if key in below}
        return m.Blocks(
            visible=ranges(here | on_flash), hot=self._hot(spans), on_flash=ranges(on_flash)
        )

    async def _stage(self, call: Call) -> Done:
        request = request_of(call, m.Stage)
        if self._tiers is not None:
            self._tiers.stage(list(m.named(request.spans).values()), request.deadline_s)
        return Done()

    def _below(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that the second tier has: a get brings them up."""
        return set() if self._tiers is None else self._tiers.found(keys)

    def _hot(self, spans: Sequence[m.Span]) -> tuple[m.Hot, ...]:
        """Count the reads of segments that are at home here; return those that shall spread."""
        if self._handover.nodes < 2:
            return ()
        now_s = self._state.now_s()
        segments = {span.segment_key for span in spans if self._handover.is_home(span.segment_key)}
        most = self._handover.nodes
        copies = {
            segment: self._heat.read(segment, now_s, most=most) for segment in sorted(segments)
        }
        return tuple((segment, count) for segment, count in copies.items() if count > 1)

    async def _claim(self, call: Call) -> m.Claimed:
        request = request_of(call, m.Claim)
        keys = m.named(request.spans)
        now_s = self._state.now_s()
        below = self._below([k for k in keys.values() if k not in self._state.index.ledger.entries])
        asked = {index: key for index, key in keys.items() if key not in below}
        verdicts = self._state.index.claim(request.owner, list(asked.values()), now_s)
        self._state.notify()
        answers = dict.fromkeys(keys, _VISIBLE) | dict(zip(asked, verdicts, strict=True))
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
                    below = self._below(unclaimed)
                    visible, unclaimed = (
                        [*visible, *below],
                        [k for k in unclaimed if k not in below],
                    )
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

        before = self._keys()
        blocks = self._state.index.drop(matches, self._state.now_s())
        self._state.notify()
        below, unerased = await self._drop_below(DropOrder(*by_field, request.keys), before)
        return m.Dropped(blocks=blocks + below, unerased=unerased[: m.WHY_MAX])

    async def _bar(self, call: Call) -> m.Dropped:
        request = request_of(call, m.Bar)
        before = self._keys()
        blocks, ends = self._state.index.bar(request.writer, request.after, self._state.now_s())
        self._state.notify()
        gone = tuple(before - self._state.index.ledger.entries.keys())
        below, unerased = await self._drop_below(DropOrder(writer=request.writer), before)
        if gone and not unerased:  # what was computed upon his blocks, and has other writers
            _, unerased = await self._drop_below(DropOrder(keys=gone), before)
        _log.error(
            "writer %s is barred, said %s: %d blocks erased",
            request.writer,
            call.peer.member_id,
            blocks + below,
        )
        return m.Dropped(
            blocks=blocks + below, ends=tuple(ends[: m.KEYS_MAX]), unerased=unerased[: m.WHY_MAX]
        )

    def _keys(self) -> set[bytes]:
        return set() if self._tiers is None else set(self._state.index.ledger.entries)

    async def _drop_below(self, order: DropOrder, before: set[bytes]) -> tuple[int, str]:
        """Erase on flash what the index has erased from memory, which had the keys `before`.
        Returns how many more went, and why not all, if so."""
        if self._tiers is None:
            return 0, self._flash_lost
        try:
            gone = list(before - self._state.index.ledger.entries.keys())
            return await self._tiers.drop(order, gone), ""
        except Unavailable as error:
            return 0, str(error)

    async def _stats(self, call: Call) -> m.StatsReply:
        counts = self.counts()
        self._state.notify()
        return m.StatsReply(counts=counts, tenants=tuple(self.tenants()))

    async def _drain(self, call: Call) -> Done:
        self.drain()
        return Done()
