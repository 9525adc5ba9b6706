"""A store cluster inside one event loop: real nodes, real clients, simulated wires and transports.

Connections are pairs of byte streams in memory; bytes move through `memory_transport`. Runs
on trio's mock clock, so a minute of deadlines takes no time. Everything a test breaks is a method
here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import numpy as np
from numpy.typing import NDArray

from inline import InlineExecutor
from kvass.common.block import BlockLayout
from kvass.common.clock import LoopClock
from kvass.common.keys import Chain, Namespace, Salt, ranges_of
from kvass.common.metrics import BlockMetrics
from kvass.common.rpc.hello import Hello
from kvass.common.rpc.server import Call, Handler, Server
from kvass.common.transport.identity import Identity
from kvass.common.transport.route import Setting
from kvass.common.transport.seam import Region
from kvass.common.wire import Message, Tags
from kvass.kvstore import messages as m
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.index.index import Index, Limits
from kvass.kvstore.node.node import Node
from kvass.kvstore.node.slab import Slab
from kvass.kvstore.placement import StoreNode
from kvass.kvstore.router import Router
from kvass.kvstore.transfers import Transfers
from memory_transport import Attempt, Fabric, Fault, Outcome, region_of
from trust import CREDENTIALS
from wires import SimDialer, Weather, Wire, calm

LAYOUT = BlockLayout(layers=2, kv_heads=4, head_dim=16, block_tokens=4, kv_dtype="fp8")
TP_LAYOUT = BlockLayout(
    layers=2, kv_heads=4, head_dim=16, block_tokens=4, kv_dtype="fp8", head_groups=4
)
SPACE = Namespace(b"n" * 32)


async def answered(handler: Handler, call: Call) -> Message | None:
    """Call a handler, whichever kind it is."""
    answer = handler(call)
    return answer if isinstance(answer, Message) else await answer


def chain_of(
    blocks: int, *, seed: int = 0, layout: BlockLayout = LAYOUT, salt: bytes = b""
) -> Chain:
    """Return a chain of `blocks` full blocks; equal seeds give equal chains, prefixes included."""
    chain = Chain(SPACE, layout.block_tokens, salt=Salt(salt))
    rng = np.random.default_rng(seed)
    chain.extend(int(t) for t in rng.integers(0, 50_000, blocks * layout.block_tokens))
    return chain


def chain_from(tokens: Sequence[int], salt: bytes) -> Chain:
    """Name the blocks of a token sequence."""
    chain = Chain(SPACE, LAYOUT.block_tokens, salt=Salt(salt))
    chain.extend(tokens)
    return chain


class SlotArray:
    """A worker's slots, without torch; filled with 0xEE, so that a slot nobody wrote is seen."""

    def __init__(self, layout: BlockLayout, slots: int) -> None:
        self.array: NDArray[np.uint8] = np.full((slots, layout.block_size), 0xEE, dtype=np.uint8)
        self.address = int(self.array.ctypes.data)
        self.size = self.array.nbytes
        self.layout = layout

    @property
    def region(self) -> Region:
        return region_of(self.array)

    def addresses(self, slots: Sequence[int]) -> NDArray[np.uint64]:
        size = np.uint64(self.layout.block_size)
        return np.array(slots, dtype=np.uint64) * size + np.uint64(self.address)

    def fill(self, slot: int, key: bytes) -> None:
        """Write the one right content of a block into a slot."""
        self.array[slot] = content(key, self.layout.block_size)

    def is_right(self, slot: int, key: bytes) -> bool:
        return bool((self.array[slot] == content(key, self.layout.block_size)).all())


def content(key: bytes, size: int) -> NDArray[np.uint8]:
    """Return bytes that only the block of this key has."""
    return np.random.default_rng(list(key)).integers(0, 256, size, dtype=np.uint8)


@dataclass
class SimNode:
    """One node's life: `start_id` changes with each start."""

    member_id: str
    node: Node
    index: Index
    slab: Slab
    server: Server
    identity: Identity
    scope: anyio.CancelScope
    tasks: anyio.abc.TaskGroup
    dialer: SimDialer
    wires: list[Wire]
    alive: bool = True

    def set_nodes(self, nodes: list[StoreNode]) -> None:
        """Tell it of the cluster's nodes."""
        self.node.set_nodes(nodes)


@dataclass
class Worker:
    """A client with memory."""

    store: StoreClient
    memory: SlotArray
    hello: Hello
    dialer: SimDialer
    wires: list[Wire] = field(default_factory=list)


Handlers = Mapping[type[Message], Handler]


class Cluster:
    """Nodes by address (which is their member id).

    `weather` is what happens to frames, `around` what a node's calls are wrapped in, `new_index`
    makes an index, `tell` and `tell_node` let a client and a node know of the nodes. Mutable
    fields: `nodes`, `workers`, `_lives` (memory that late bytes may still go to), `_starts`.
    """

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        *,
        weather: Weather = calm,
        around: Callable[[str, Handlers], Handlers] = lambda member_id, handlers: handlers,
        new_index: Callable[[int, Limits], Index] = Index,
        tell: Callable[[StoreClient, list[StoreNode]], None] = StoreClient.set_nodes,
        tell_node: Callable[[SimNode, list[StoreNode]], None] = SimNode.set_nodes,
        replicas: int = 1,
    ) -> None:
        self.tasks = tasks
        self.fabric = Fabric(tasks)
        self.nodes: dict[str, SimNode] = {}
        self.workers: list[Worker] = []
        self._weather = weather
        self._around = around
        self._new_index = new_index
        self._tell = tell
        self._tell_node = tell_node
        self._replicas = replicas
        self._lives: list[object] = []
        self._starts = 0

    def identity(self, host: str) -> Identity:
        """Return who a process is that starts now."""
        self._starts += 1
        return Identity(host_id=host, start_id=f"start-{self._starts}", pid=self._starts)

    def add_node(
        self,
        member_id: str,
        *,
        blocks: int = 64,
        layout: BlockLayout = LAYOUT,
        host: str = "host-0",
        setting: Setting = "auto",
        landing_bytes: int = 1 << 20,
        scrub_s: float = 0.0,
        **limits: Any,
    ) -> SimNode:
        """Start a node with room for `blocks` blocks, or start it anew."""
        identity = self.identity(host)
        slab = Slab(blocks * layout.block_size)
        endpoints = self.fabric.endpoints(
            identity, [slab.region], setting=setting, landing_bytes=landing_bytes
        )
        index = self._new_index(slab.size, Limits(epoch=identity.start_id, **limits))
        index.ledger.copy_bytes = slab.copy
        hello = Hello("store", member_id, host, identity.start_id, identity.pid, {})
        wires: list[Wire] = []
        dialer = self.dialer(hello, self.tasks, wires)
        clock = LoopClock()
        router = Router(self.tasks, dialer, endpoints, Counter(), clock.now_s)
        executor = InlineExecutor()
        node = Node(
            member_id, index, slab, endpoints, executor, clock, router, self.tasks, scrub_s=scrub_s
        )
        handlers = self._around(member_id, node.handlers())
        server = Server(hello, handlers, CREDENTIALS, on_leave=node.on_leave)
        scope = anyio.CancelScope()
        sim = SimNode(
            member_id, node, index, slab, server, identity, scope, self.tasks, dialer, wires
        )
        self._lives.append(slab)

        async def run() -> None:
            with scope:
                await node.run()

        self.tasks.start_soon(run)
        self.nodes[member_id] = sim
        self.share_view()
        return sim

    def add_worker(
        self,
        name: str = "prefill-0",
        *,
        tasks: anyio.abc.TaskGroup | None = None,
        slots: int = 256,
        layout: BlockLayout = LAYOUT,
        groups: range | None = None,
        host: str = "host-0",
        setting: Setting = "auto",
        landing_bytes: int = 1 << 20,
        metrics: BlockMetrics | None = None,
    ) -> Worker:
        """Start a worker with `slots` slots; what it does by itself runs in `tasks`."""
        tasks = tasks or self.tasks
        identity = self.identity(host)
        memory = SlotArray(layout, slots)
        endpoints = self.fabric.endpoints(
            identity, [region_of(memory.array)], setting=setting, landing_bytes=landing_bytes
        )
        groups = range(layout.head_groups) if groups is None else groups
        transfers = Transfers(memory, layout, groups, endpoints, InlineExecutor(), tasks)
        hello = Hello(name.partition("-")[0], name, host, identity.start_id, identity.pid, {})
        wires: list[Wire] = []
        dialer = self.dialer(hello, tasks, wires)
        store = StoreClient(hello, tasks, dialer=dialer, transfers=transfers, metrics=metrics)
        worker = Worker(store, memory, hello, dialer, wires)
        self.workers.append(worker)
        self._lives.append(memory)
        self.share_view()
        return worker

    def dialer(self, hello: Hello, tasks: anyio.abc.TaskGroup, wires: list[Wire]) -> SimDialer:
        """Return what a process dials store nodes with."""
        replies = Tags(m.STORE_REPLIES)
        return SimDialer(tasks, self.nodes, hello, wires, replies, self._weather)

    def view(self, *, alive_only: bool = False) -> list[StoreNode]:
        """Return the nodes as the membership would."""
        return [
            StoreNode(
                node.member_id,
                node.member_id,
                node.slab.size,
                node.identity.host_id,
                replicas=self._replicas,
                draining=node.index.draining,
            )
            for node in self.nodes.values()
            if node.alive or not alive_only
        ]

    def share_view(self) -> None:
        """Tell every worker and every node which nodes there are."""
        for worker in self.workers:
            self._tell(worker.store, self.view())
        for node in self.nodes.values():
            if node.alive:
                self._tell_node(node, self.view())

    def kill_node(self, member_id: str) -> None:
        """Kill -9."""
        node = self.nodes[member_id]
        node.alive = False
        node.scope.cancel()
        node.dialer.is_over = True
        self.fabric.kill(node.identity.start_id)
        for wire in node.wires:
            wire.cut()

    def kill_worker(self, worker: Worker) -> None:
        """Kill -9; the worker's own tasks are the test's to cancel."""
        worker.dialer.is_over = True
        self.fabric.kill(worker.hello.start_id)
        for wire in worker.wires:
            wire.cut()

    def hang_node(self, member_id: str, hung: bool) -> None:
        """SIGSTOP, SIGCONT."""
        node = self.nodes[member_id]
        self.hang(node.identity.start_id, node.wires, hung)

    def hang(self, start_id: str, wires: list[Wire], hung: bool) -> None:
        """Stop or continue any process, as far as its connections and its memory go."""
        for wire in wires:
            wire.hang(hung)
        if hung:
            self.fabric.hang(start_id)
        else:
            self.fabric.resume(start_id)

    def check(self) -> None:
        """Assert every living node's conservation law."""
        for node in self.nodes.values():
            if node.alive:
                node.index.ledger.check()


@asynccontextmanager
async def cluster(*, replicas: int = 1, bugs: bool = False) -> AsyncIterator[Cluster]:
    """Run a cluster; leaving checks every node's law once more, and that it met no bug unless
    `bugs` are planted."""
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, replicas=replicas)
        yield sim
        sim.check()
        if not bugs:
            assert not any(node.node.faults["bugs"] for node in sim.nodes.values())
        tasks.cancel_scope.cancel()


async def push(worker: Worker, chain: Chain, indices: Sequence[int], **terms: object) -> m.Ranges:
    """Fill slots with the blocks' content and push them; return what was stored."""
    slots = list(range(len(indices)))
    for slot, index in zip(slots, indices, strict=True):
        worker.memory.fill(slot, chain.keys[index])
    hold_owner = terms.get("hold_owner")
    assert hold_owner is None or isinstance(hold_owner, str)
    result = await worker.store.push(
        chain,
        indices,
        slots,
        hold_owner=hold_owner,
        tenant=str(terms.get("tenant", "")),
        deadline_s=5.0,
    )
    assert result.stored.isdisjoint(result.refused)
    assert result.stored | set(result.refused) == set(indices)
    return tuple(ranges_of(sorted(result.stored)))


async def pull(worker: Worker, chain: Chain, indices: Sequence[int]) -> set[int]:
    """Pull blocks into fresh slots; assert that whatever is said to be there is right."""
    slots = list(range(100, 100 + len(indices)))
    worker.memory.array[slots] = 0xEE
    there = await worker.store.pull(chain, indices, slots, deadline_s=5.0)
    for slot, index in zip(slots, indices, strict=True):
        if index in there:
            assert worker.memory.is_right(slot, chain.keys[index]), f"wrong bytes for block {index}"
    return there


def faults(sim: Cluster, verb: str, outcome: Outcome, *, times: int = 1 << 30) -> None:
    """Let the next transfers of one verb meet a fault."""
    left = [times]

    def fault(attempt: Attempt) -> Fault:
        if attempt.verb != verb or not left[0]:
            return Fault()
        left[0] -= 1
        return Fault(outcome)

    sim.fabric.fault = fault


async def at_rest(sim: Cluster, member_id: str = "store-0") -> dict[str, int]:
    """Return a node's counts, with nothing left over from what went before."""
    await anyio.sleep(0.1)  # virtual: leases are ended in the background
    counts = sim.nodes[member_id].node.counts()
    for name in ("writing_bytes", "retired_bytes", "quarantined_bytes", "leases", "puts"):
        assert counts[name] == 0, (name, counts)
    assert counts["landing_lent_bytes"] == 0
    return counts
