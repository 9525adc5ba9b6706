"""A store node without its listener: its calls on the wire, and the clock that ends what runs out.

The index decides, deliveries move bytes. State changes are made in the index synchronously, before
and after every await, so its conservation law holds at each suspension. It refuses to know about
membership and sockets: `service.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from heapq import nlargest

import anyio
import anyio.abc

from kvass.common.clock import Clock
from kvass.common.executor import Executor
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler
from kvass.common.transport.endpoints import Endpoints
from kvass.common.wire import Done, Message
from kvass.kvstore import messages as m
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.index.index import Index
from kvass.kvstore.index.puts import Verdict
from kvass.kvstore.node.calls.erase_calls import EraseCalls
from kvass.kvstore.node.calls.get_calls import GetCalls
from kvass.kvstore.node.calls.hold_calls import HoldCalls
from kvass.kvstore.node.calls.put_calls import PutCalls
from kvass.kvstore.node.chores import lasting
from kvass.kvstore.node.copies.exchange import Meetings
from kvass.kvstore.node.copies.fills import Filler
from kvass.kvstore.node.copies.handover import Handover
from kvass.kvstore.node.copies.heat import Heat
from kvass.kvstore.node.copies.leaving import Leaving
from kvass.kvstore.node.copies.repair import Repair
from kvass.kvstore.node.deliveries import Deliveries
from kvass.kvstore.node.keeping import Keeping
from kvass.kvstore.node.scrub import Scrubber
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.node.state import Moved, NodeState, check_own, chosen, ranges, request_of
from kvass.kvstore.node.tiers.bucket import Bucket
from kvass.kvstore.node.tiers.bucket_tier import BucketTier
from kvass.kvstore.node.tiers.flash_tier import FlashTier
from kvass.kvstore.objects.names import root_of
from kvass.kvstore.objects.store import ObjectStore
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.router import Router

_log = logging.getLogger(__name__)

# What runs out while nobody calls is noticed this late at most: short beside a claim, and the cost
# of looking is not measurable.
TICK_S = 0.1
_VISIBLE: Verdict = "visible"


class Node:
    """One store node: wire its `handlers` and `on_leave` into an RPC server, and `run` it.

    `router` leads to the cluster's other nodes; `leaving` says how far it is on its way out.
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
        self._handover = Handover(member_id, self._state, router)
        self._repair = Repair(self._handover)
        self._erasing = EraseCalls(self._state)
        self._meetings = Meetings(member_id, self._state, router, self._erasing)
        agree = self._meetings.agree
        self._filler = Filler(self._state, slab, router, executor, tasks, agree)
        self._scrubber = Scrubber(self._state, scrub_s)
        self._state.on_stored = self._handover.committed
        self._tasks = tasks
        self._slab = slab
        self._tiers: FlashTier | None = None
        self._bucket: BucketTier | None = None
        self._flash_lost = ""
        self.leaving = Leaving(self._state, self._handover, tasks)

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Take in who the cluster's store nodes are now, this one among them."""
        if self._handover.set_nodes(nodes) and self.leaving.phase == "held":
            self.leaving.begin()  # there may be room now
        self._meetings.set_nodes(nodes)
        self._repair.set_nodes(nodes)
        if self._bucket is not None:
            self._bucket.bucket.set_nodes(frozenset(node.member_id for node in nodes))

    async def all_told(self) -> None:
        """Wait until this node has heard of every erasure that the others have heard of."""
        await self._meetings.all_told()

    def add_flash(
        self, log: FlashLog, writer: Executor, readers: Executor, copiers: Executor
    ) -> None:
        """Use a second tier, before `run`."""
        self._tiers = FlashTier(self._state, self._slab, log, writer, readers, copiers, self._tasks)
        self._state.rise = self._tiers.rise
        self._state.on_asked = self._tiers.asked
        self._handover.below = self._tiers.brought_up
        self._erasing.use(self._tiers)
        self._filler.found, self._filler.has_flash = self._tiers.found, True
        self._repair.tiers = self._tiers

    def add_bucket(
        self, objects: ObjectStore, cluster: str, total_bytes: int, executor: Executor
    ) -> None:
        """Use a third tier, which the cluster's nodes share; before `run`, after `add_flash`."""
        root, clock = root_of(cluster), self._state.clock
        bucket = Bucket(objects, root, total_bytes, clock, self._handover.is_home)
        self._bucket = BucketTier(self._state, self._slab, bucket, executor, self._tasks)
        self._state.rise = self._rise
        self._state.on_asked = self._asked
        self._erasing.use_bucket(self._bucket)

    def lose_flash(self, why: str) -> None:
        """Go on with one tier where there should be two: say so, and that nothing erases the
        other."""
        self._flash_lost = why
        self._erasing.lose_flash(why)

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
            m.Stats: self._stats,
            m.Drain: self._drain,
            **self._puts.handlers(),
            **self._gets.handlers(),
            **HoldCalls(self._state).handlers(),
            **self._filler.handlers(),
            **self._erasing.handlers(),
            **self._meetings.handlers(),
        }

    async def run(self) -> None:
        """End what runs out, take copies and offer them, until cancelled."""
        chores: dict[str, Callable[[], Awaitable[None]]] = {
            "ending what runs out": self._tick,
            "taking copies": self._filler.run,
            "offering copies": self._handover.run,
            "the scrub": self._scrubber.run,
            "telling of erasures": self._meetings.run,
        }
        if self._tiers is not None:
            chores["the flash tier"] = self._tiers.run
            chores["making up for lost copies"] = self._repair.run
        if self._bucket is not None:
            chores["the bucket tier"] = self._bucket.run
        async with anyio.create_task_group() as tasks:
            for what, chore in chores.items():
                tasks.start_soon(lasting, what, chore, self._state.faults)

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(TICK_S)
            self._state.index.expire(self._state.now_s())
            self._state.index.catch_up()
            self._puts.expire(self._state.now_s())
            self._state.notify()

    async def on_leave(self, peer: Hello) -> None:
        """A peer's connection has ended: what it had begun to put is given up now."""
        self._puts.leave(peer.start_id)

    def drain(self) -> None:
        """Take no more puts and claims, and hand over what others lack. Once is enough."""
        self.leaving.begin()

    @property
    def faults(self) -> dict[str, int]:
        """What failed so far, by kind."""
        return self._state.faults

    def counts(self) -> dict[str, int]:
        """Return the index's counts, the landing memory's, and failed transfers by kind."""
        state = self._state
        state.index.expire(state.now_s())
        landing = state.endpoints.landing.counts()
        return {
            **state.index.counts(),
            **{f"landing_{name}_bytes": size for name, size in landing.items()},
            **state.faults,
            **self._puts.counts(),
            **self._filler.counts(),
            **self._handover.counts(),
            **self._repair.counts(),
            **self._scrubber.counts(),
            **self._counts_below(),
            **self._erasing.counts(),
            "hot_segments": self._heat.hot(),
            "waited_blocks": len(state.waiters),
            "draining": int(state.index.draining),
            "drain_held": int(self.leaving.phase == "held"),
            "drained": int(self.leaving.phase == "drained"),
        }

    def _counts_below(self) -> dict[str, int]:
        """Return the lower tiers' counts; with `hits` and `misses`, which they change."""
        totals = {"flash_off": 1} if self._flash_lost else {}
        if self._tiers is not None:
            totals |= self._tiers.totals()
        if self._bucket is not None:
            totals |= self._bucket.totals()
        found = totals.get("flash_hits", 0) + totals.get("bucket_hits", 0)
        index = self._state.index
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

    def _lookup(self, call: Call) -> m.Blocks:
        request = request_of(call, m.Lookup)
        keys = m.named(request.spans)
        found = self._state.index.lookup([*keys.values()], self._state.now_s(), again=request.again)
        self._state.notify()
        call.later(self._state.index.catch_up)
        here = {i for i, is_here in zip(keys, found, strict=True) if is_here}
        self._asked([keys[i] for i in here])
        flash, bucket = self._found_below([key for i, key in keys.items() if i not in here])
        on_flash = {i for i, key in keys.items() if key in flash}
        in_bucket = {i for i, key in keys.items() if key in bucket}
        for tier, below in ((self._tiers, on_flash), (self._bucket, in_bucket)):
            if tier is not None and not request.again:
                tier.counts["hits"] += len(below)
        return m.Blocks(
            visible=ranges(here | on_flash | in_bucket),
            hot=self._hot(request.spans),
            on_flash=ranges(on_flash),
            in_bucket=ranges(in_bucket),
        )

    def _stage(self, call: Call) -> Done:
        request = request_of(call, m.Stage)
        keys = list(m.named(request.spans).values())
        if self._tiers is not None:
            self._tiers.stage(keys, request.deadline_s)
        if self._bucket is not None:
            self._bucket.stage(self._not_on_flash(keys), request.deadline_s)
        return Done()

    def _asked(self, keys: Sequence[bytes]) -> None:
        """Somebody asks for these blocks: what is in memory is worth a place below."""
        if self._tiers is not None:
            self._tiers.asked(keys)
        if self._bucket is not None:
            self._bucket.asked(keys)

    async def _rise(self, keys: Sequence[bytes], keep: Keeping) -> None:
        """Bring blocks up from both tiers at once, each from the nearer one."""
        missing = [key for key in keys if key not in self._state.index.ledger.entries]
        if not missing:
            return
        async with anyio.create_task_group() as tasks:
            if self._tiers is not None:
                tasks.start_soon(self._tiers.rise, missing, keep)
            if self._bucket is not None:
                tasks.start_soon(self._bucket.rise, self._not_on_flash(missing), keep)

    def _not_on_flash(self, keys: Sequence[bytes]) -> list[bytes]:
        found = set() if self._tiers is None else self._tiers.found(keys)
        return [key for key in keys if key not in found]

    def _below(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of `keys` that a tier below has: a get brings them up."""
        return set().union(*self._found_below(keys))

    def _found_below(self, keys: Sequence[bytes]) -> tuple[set[bytes], set[bytes]]:
        """Return those of `keys` that are on flash, and those that only the bucket has."""
        on_flash = set() if self._tiers is None else self._tiers.found(keys)
        if self._bucket is None:
            return on_flash, set()
        return on_flash, self._bucket.found([key for key in keys if key not in on_flash])

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

    def _claim(self, call: Call) -> m.Claimed:
        request = request_of(call, m.Claim)
        keys = m.named(request.spans)
        below = self._below([k for k in keys.values() if k not in self._state.index.ledger.entries])
        asked = {index: key for index, key in keys.items() if key not in below}
        verdicts = self._state.index.claim(request.owner, list(asked.values()), self._state.now_s())
        self._state.notify()
        answers = dict.fromkeys(keys, _VISIBLE) | dict(zip(asked, verdicts, strict=True))
        return m.Claimed(
            granted=chosen(answers, "granted"),
            visible=chosen(answers, "visible"),
            taken=chosen(answers, "busy"),
        )

    def _release_claims(self, call: Call) -> Done:
        request = request_of(call, m.ReleaseClaims)
        self._state.index.release_claims(request.owner, self._state.now_s())
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

    def _stats(self, call: Call) -> m.StatsReply:
        reply = m.StatsReply(counts=self.counts(), tenants=tuple(self.tenants()))
        self._state.notify()
        return reply

    def _drain(self, call: Call) -> Done:
        match request_of(call, m.Drain).how:
            case "begin":
                self.leaving.begin()
            case "force":
                self.leaving.force()
            case "cancel":
                self.leaving.cancel()
        return Done()
