"""The store as its users see it: one cluster-wide set of blocks, named by chains.

    async with open_client(config, hello, memory=pool, layout=layout) as store:
        store.set_nodes(nodes)
        found = await store.lookup(chain, [(0, 64)], deadline_s=1.0)    # ranges that are there
        there = await store.pull(chain, indices, slots, deadline_s=5.0)  # in place, checked
        put = await store.push(chain, indices, slots, hold_owner=None, tenant="", deadline_s=5.0)

Every fault (a node down, a lease over, a checksum wrong) is a miss, counted, and never raised. A
segment's blocks are at its home nodes, or at the next one in rendezvous order: that one is asked
before anything is called a miss, and a home that had them not is told to take a copy. Without
`memory` it only controls: neither torch nor NIXL is loaded. For arrays of one's own: `tensors.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import anyio.abc

from kvass.common.clock import Clock, LoopClock
from kvass.common.config import TransportConfig
from kvass.common.errors import Invalid, KvassError
from kvass.common.executor import ThreadExecutor
from kvass.common.keys import Chain, Namespace, ranges_of
from kvass.common.metrics import BlockMetrics
from kvass.common.native import library
from kvass.common.rpc.credentials import Credentials
from kvass.common.rpc.dial import Dialer
from kvass.common.rpc.hello import Hello
from kvass.common.transport.identity import Identity
from kvass.common.wire import Range, Tags
from kvass.kvstore import links
from kvass.kvstore import messages as m
from kvass.kvstore.client import erase
from kvass.kvstore.client.counts import show_counts
from kvass.kvstore.client.pulls import pull
from kvass.kvstore.client.pushes import PutTerms, push
from kvass.kvstore.erasure import new_id
from kvass.kvstore.links import NodeLink
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.results import ClaimResult, PushResult, WaitResult
from kvass.kvstore.router import Router
from kvass.kvstore.transfers import BlockShape, OwnMemory, Transfers

COPY_THREADS = 2  # one part is hashed while the next one is copied out of its landing buffer
WAIT_PAUSE_S = 0.01  # between two times that a node is asked to
WAIT_SLICE_S = 2.0  # how long one node is asked to wait before it must show that it lives


class StoreClient:
    """See the module. Safe to use from any number of tasks of one event loop.

    `hello` says who this process is; its member id is the writer of what is pushed. Connections
    live in `tasks`, the owner's task group. Mutable field: `counts`, of what went wrong, by kind;
    `metrics` shows them.
    """

    def __init__(
        self,
        hello: Hello,
        tasks: anyio.abc.TaskGroup,
        credentials: Credentials | None = None,
        *,
        dialer: links.Dialer | None = None,
        transfers: Transfers | None = None,
        metrics: BlockMetrics | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._writer = hello.member_id
        self._transfers = transfers
        self._metrics = metrics
        self._now_s = (clock or LoopClock()).now_s
        self.counts: Counter[str] = Counter() if transfers is None else transfers.counts
        if metrics is not None:
            show_counts(metrics, self.counts)
        endpoints = None if transfers is None else transfers.endpoints
        if dialer is None:
            assert credentials is not None, "nodes listen to nobody who proves nothing"
            dialer = Dialer(tasks, hello, Tags(m.STORE_REPLIES), credentials)
        self._router = Router(tasks, dialer, endpoints, self.counts, self._now_s)

    @property
    def router(self) -> Router:
        """How calls reach the nodes: for what `erase.py` asks of them."""
        return self._router

    def set_nodes(self, nodes: Sequence[StoreNode]) -> None:
        """Use these nodes from now on; what is in flight to others goes on."""
        self._router.set_nodes(nodes)

    # --- where blocks are ---

    async def lookup(
        self,
        chain: Chain,
        ranges: Iterable[Range],
        *,
        deadline_s: float,
        stage_s: float = 0.0,
        again: bool = False,
    ) -> list[Range]:
        """Return which of these blocks are in the store now. Protects nothing. With `stage_s`, the
        time in which they will be pulled, those that are below memory are brought up meanwhile.
        Each is counted once, by the first node; `again`: it was, for the same request."""
        wanted = _flat(ranges)
        counted = set(wanted) if again else set[int]()

        async def ask(link: NodeLink, indices: list[int], left_s: float) -> set[int]:
            spans = tuple(m.spans_of(chain, ranges_of(indices)))
            request = m.Lookup(spans=spans, again=not counted.isdisjoint(indices))
            reply = await link.call(request, deadline_s=left_s)
            counted.update(indices)
            (visible,) = link.told(indices, reply.visible)
            flash, bucket = link.told(indices, reply.on_flash, reply.in_bucket)
            below = ranges_of(sorted(flash | bucket))
            self._router.note_hot(reply.hot)
            if stage_s and below:
                spans = tuple(m.spans_of(chain, below))
                self._router.tell_later(link, m.Stage(spans=spans, deadline_s=stage_s))
            return visible

        found = await self._router.everywhere(chain, wanted, ask, deadline_s)
        return ranges_of(sorted(found))

    async def wait(
        self, chain: Chain, ranges: Iterable[Range], *, until: m.Until, deadline_s: float
    ) -> WaitResult:
        """Return as soon as at least one of these blocks is visible or, `until="settled"`, is one
        that nobody has, computes or writes; at the deadline both are empty."""
        ends_s = self._now_s() + deadline_s
        wanted = _flat(ranges)
        results: list[WaitResult] = []
        with anyio.move_on_after(deadline_s):
            async with anyio.create_task_group() as tasks:

                async def one(indices: list[int]) -> None:
                    results.append(await self._wait_at_home(chain, indices, until, ends_s))
                    tasks.cancel_scope.cancel()

                plan = self._router.plan(chain, wanted, set(), writing=True)
                homeless = wanted.difference(*plan.values())
                for indices in [*plan.values(), sorted(homeless)]:
                    if indices:
                        tasks.start_soon(one, indices)
        return results[0] if results else WaitResult([], [])

    async def _wait_at_home(
        self, chain: Chain, indices: list[int], until: m.Until, ends_s: float
    ) -> WaitResult:
        """Wait at the blocks' node, or at the next one when it stops answering."""
        spans = tuple(m.spans_of(chain, ranges_of(indices)))
        while True:
            link = self._router.first(chain.segment_key(indices[0]), set(), writing=True)
            if link is None and until == "settled":  # nobody can say that they are being computed
                return WaitResult([], ranges_of(indices))
            if link is None:
                await anyio.sleep(links.SHUN_S / 2)
                continue
            slice_s = max(min(ends_s - self._now_s(), WAIT_SLICE_S), 1e-3)
            limit_s = slice_s + links.CALL_S
            request = m.Wait(spans=spans, until=until, deadline_s=slice_s)
            begun_s = self._now_s()
            with suppress(KvassError):  # one that does not answer is left alone from now on
                reply = await link.call(request, deadline_s=limit_s, limit_s=limit_s)
                link.told(indices, reply.visible, reply.unclaimed)
                if reply.visible or reply.unclaimed:
                    return WaitResult(list(reply.visible), list(reply.unclaimed))
            # One that is overloaded says so at once, and is asked again.
            await anyio.sleep(max(begun_s + WAIT_PAUSE_S - self._now_s(), 0.0))

    # --- claims ---

    async def claim(
        self, chain: Chain, ranges: Iterable[Range], *, owner: str, deadline_s: float
    ) -> ClaimResult:
        """Say that `owner` computes these blocks; again, to renew. Blocks whose nodes cannot be
        asked are in no list: computed, they could not be stored."""
        granted: set[int] = set()
        visible: set[int] = set()
        taken: set[int] = set()

        async def ask(link: NodeLink, indices: list[int], left_s: float) -> set[int]:
            spans = tuple(m.spans_of(chain, ranges_of(indices)))
            reply = await link.call(m.Claim(owner=owner, spans=spans), deadline_s=left_s)
            answers = link.told(indices, reply.granted, reply.visible, reply.taken)
            for found, said in zip((granted, visible, taken), answers, strict=True):
                found.update(said)
            return set().union(*answers)  # a node that takes nothing new says nothing of the rest

        await self._router.everywhere(chain, _flat(ranges), ask, deadline_s, writing=True)
        return ClaimResult(*(ranges_of(sorted(s)) for s in (granted, visible, taken)))

    async def release_claims(self, owner: str) -> None:
        """End the owner's claims; where a node cannot be told they run out by themselves."""
        await self._router.tell_all(m.ReleaseClaims(owner=owner))

    # --- bytes ---

    async def pull(
        self, chain: Chain, indices: Sequence[int], slots: Sequence[int], *, deadline_s: float
    ) -> set[int]:
        """Bring blocks into own slots; return the indices that are in place, checked by checksum.

        The rest are misses, and their slots' content is undefined. When this returns, raises or is
        cancelled, no transfer into the slots is in flight.
        """
        transfers = self._moving()
        place = dict(zip(indices, slots, strict=True))
        assert len(place) == len(slots), "a chain index comes twice"
        missed: dict[int, str] = {}
        lacking: dict[int, NodeLink] = {}  # the first node that was asked, and had it not
        fills: dict[tuple[NodeLink, NodeLink], list[int]] = {}
        begun_s = self._now_s()

        async def ask(link: NodeLink, part: list[int], left_s: float) -> set[int]:
            wanted = {index: place[index] for index in part}
            ends_s = self._now_s() + left_s
            outcome = await pull(transfers, link, chain, wanted, ends_s=ends_s)
            for index, why in outcome.missed.items():
                missed.setdefault(index, why)  # the next node seldom has it: the first one says why
                if why == "gone":
                    lacking.setdefault(index, link)
            for index in outcome.pulled.intersection(lacking):
                fills.setdefault((lacking[index], link), []).append(index)
            return outcome.pulled

        pulled = await self._router.everywhere(chain, set(place), ask, deadline_s)
        for (link, source), indices_there in fills.items():
            if not link.node.draining:
                spans = tuple(m.spans_of(chain, ranges_of(sorted(indices_there))))
                request = m.Fill(source=source.node.member_id, spans=spans)
                self._router.tell_later(link, request)
        for index in place.keys() - pulled:
            self.counts[f"missed_{missed.get(index, 'unavailable')}"] += 1
        self._measure("pull", len(pulled) * transfers.share, self._now_s() - begun_s)
        return pulled

    async def push(
        self,
        chain: Chain,
        indices: Sequence[int],
        slots: Sequence[int],
        *,
        hold_owner: str | None,
        tenant: str,
        deadline_s: float,
    ) -> PushResult:
        """Offer blocks from own slots, which must not change before this returns.

        With `hold_owner` they are kept for that job until `release_hold`, or for a while. Raises
        nothing: what could not be stored is refused, with the reason.
        """
        transfers = self._moving()
        place = dict(zip(indices, slots, strict=True))
        terms = PutTerms(self._writer, tenant, hold_owner or "")
        stored: set[int] = set()
        refused: dict[int, str] = dict.fromkeys(place, "unavailable")
        moved = 0
        begun_s = self._now_s()

        async def ask(link: NodeLink, part: list[int], left_s: float) -> set[int]:
            nonlocal moved
            wanted = {index: place[index] for index in part}
            ends_s = self._now_s() + left_s
            outcome = await push(transfers, link, chain, wanted, terms, ends_s=ends_s)
            done, why = outcome.stored, outcome.refused
            moved += outcome.moved
            stored.update(done)
            refused.update(why)
            # A node that is full or busy has answered: the next one is no better place.
            return done | {index for index, reason in why.items() if reason in ("full", "busy")}

        await self._router.everywhere(chain, set(place), ask, deadline_s, writing=True)
        refused = {index: why for index, why in refused.items() if index not in stored}
        self._measure("push", moved * transfers.share, self._now_s() - begun_s)
        for why in refused.values():
            self.counts[f"push_{why}"] += 1
        return PushResult(stored, refused)

    def _moving(self) -> Transfers:
        if self._transfers is None:
            raise Invalid("this store client was opened without memory: it moves no blocks")
        return self._transfers

    def _measure(self, direction: str, size_bytes: int, time_s: float) -> None:
        if self._metrics is not None and size_bytes:
            self._metrics.bytes.labels(direction).inc(size_bytes)
            self._metrics.seconds.labels(direction).observe(time_s)

    # --- protection, erasure, counts ---

    async def release_hold(self, owner: str) -> None:
        """The job has its blocks: they may be evicted again."""
        await self._router.tell_all(m.ReleaseHold(owner=owner))

    async def pin(
        self,
        chain: Chain,
        ranges: Iterable[Range],
        *,
        owner: str,
        duration_s: float,
        deadline_s: float,
    ) -> list[Range]:
        """Keep blocks from eviction for a while; return those that are pinned (here, within
        quota)."""

        async def ask(link: NodeLink, indices: list[int], left_s: float) -> set[int]:
            spans = tuple(m.spans_of(chain, ranges_of(indices)))
            request = m.Pin(owner=owner, spans=spans, duration_s=duration_s)
            reply = await link.call(request, deadline_s=left_s)
            return link.told(indices, reply.visible)[0]

        return ranges_of(
            sorted(await self._router.everywhere(chain, _flat(ranges), ask, deadline_s))
        )

    async def unpin(self, owner: str) -> None:
        """End an owner's pins."""
        await self._router.tell_all(m.Unpin(owner=owner))

    async def drop(
        self,
        *,
        namespace: Namespace | None = None,
        tenant: str | None = None,
        writer: str | None = None,
        keys: Sequence[bytes] | None = None,
        deadline_s: float = 10.0,
    ) -> int:
        """Erase blocks that match everything that is given; return how many went.

        Raises Unavailable when a node could not be told: an erasure must not be half done unseen.
        """
        named = None if keys is None else tuple(keys)
        request = m.Drop(namespace=namespace, tenant=tenant, writer=writer, keys=named, id=new_id())
        return await erase.drop(self._router, request, deadline_s)

    async def stats(self, *, deadline_s: float = 1.0) -> list[dict[str, str | int]]:
        """Return the counts of each node that answers, with its `id`, in order of id."""
        replies, _ = await self._router.ask_all(m.Stats(), deadline_s)
        return [{"id": member_id, **replies[member_id].counts} for member_id in sorted(replies)]

    async def drain(
        self, member_id: str, how: m.DrainHow = "begin", *, deadline_s: float = 1.0
    ) -> None:
        """Let one node leave, or stay after all; raises KvassError."""
        await self._router.link(member_id).call(m.Drain(how=how), deadline_s=deadline_s)


def _flat(ranges: Iterable[Range]) -> set[int]:
    return {index for first, stop in ranges for index in range(first, stop)}


@asynccontextmanager
async def open_client(
    config: TransportConfig,
    hello: Hello,
    credentials: Credentials,
    *,
    memory: OwnMemory | None = None,
    layout: BlockShape | None = None,
    groups: range | None = None,
    metrics: BlockMetrics | None = None,
) -> AsyncIterator[StoreClient]:
    """Open a client over the real transports; asyncio only.

    `memory` is registered with them and must outlive the client. `groups`: the head groups that
    this process moves, all by default. Without `memory` the client only controls, and
    `StoreClient(hello, tasks, credentials)` does as well.
    """
    failure: Exception | None = None
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        transfers = None
        if memory is not None:
            assert layout is not None
            library.in_use()  # a setting that is wrong is said now, not by the first transfer
            identity = Identity(hello.host_id, hello.start_id, hello.pid)
            region = memory.region
            # Late, because it loads NIXL, which takes 0.2 s and which a gateway never needs.
            from kvass.common.transport.nixl import open_endpoints

            endpoints = await open_endpoints(config, identity, [region])
            stack.callback(endpoints.close)
            executor = ThreadExecutor("kvass-copy", COPY_THREADS)
            stack.callback(executor.close)
            groups = range(layout.head_groups) if groups is None else groups
            transfers = Transfers(memory, layout, groups, endpoints, executor, tasks)
        try:
            yield StoreClient(hello, tasks, credentials, transfers=transfers, metrics=metrics)
        except Exception as error:  # what the caller raised stays itself, in no group
            failure = error
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
