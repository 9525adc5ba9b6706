"""The members of a simulated cluster, and what each is told of the others.

Membership's news comes late, and to each in its own time. The gateway's view is the real table.
"""

from __future__ import annotations

import random
from functools import partial

import anyio
import anyio.abc

from disturbance import Disturbance
from flash_sim import give_flash, lose_power
from kvass.common.membership import ROLES, Load, NodeTable, Peer, Role
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.placement import StoreNode
from lives import Life, live
from memory_disk import MemoryDisk
from probe import NAME, Prober
from record import Record
from scenario import Member, Scenario
from store_sim import Cluster, SimNode
from watch import History, WatchedIndex

LOAD_S = 0.5


class View:
    """What the gateway knows of the workers. Mutable field: `table`."""

    def __init__(self) -> None:
        self.table = NodeTable(ROLES)

    def live(self, role: Role) -> list[Peer]:
        return self.table.live(role, anyio.current_time())

    def load_of(self, peer: Peer) -> Load:
        return self.table.load(peer.start_id)

    def refused(self, peer: Peer) -> None:
        self.table.refused(peer.start_id, anyio.current_time())


class Members:
    """Store nodes and workers. Mutable fields: `lives` (the present start of each worker, by member
    id), `gateway_stores` (the gateway's clients of the store), `view`, `history`, `prober`, `disks`
    (of store nodes, by member id), `_starting` (one of them reads its disk)."""

    def __init__(
        self,
        scenario: Scenario,
        disturbance: Disturbance,
        record: Record,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self.scenario = scenario
        self.tasks = tasks
        self.rng = random.Random(f"news {scenario.seed}")
        self.lives: dict[str, Life] = {}
        self.disks: dict[str, MemoryDisk] = {}
        self._luck = random.Random(f"disks {scenario.seed}")
        self._starting = False
        self.gateway_stores: list[StoreClient] = []
        self.view = View()
        self.view.table.link_up(-1e3)  # long ago: silence counts from the beginning
        self.history = History()
        self._disturbance = disturbance
        self.sim = Cluster(
            tasks,
            weather=disturbance.frame,
            around=disturbance.around,
            new_index=partial(WatchedIndex, history=self.history),
            tell=self._tell,
            tell_node=self._tell_node,
            replicas=scenario.replicas,
        )
        self.prober = Prober(self.sim, self.history, record, tasks)
        disturbance.spared |= {NAME, self.prober.worker.hello.start_id}
        self.sim.fabric.fault = disturbance.move

    async def start(self) -> None:
        """Start everybody; the run begins when all know of each other."""
        for member in self.scenario.stores:
            if not member.late:
                self.start_store(member)
        for member in (*self.scenario.prefills, *self.scenario.decodes):
            await self.start_worker(member)
        for store in self._stores():
            store.set_nodes(self.sim.view())
        for node in self.sim.nodes.values():
            node.node.set_nodes(self.sim.view())
        self.tasks.start_soon(self._loads)

    def start_store(self, member: Member) -> None:
        """Start a store node, or start it anew: of what it had it has what is on its disk."""
        node = self.sim.add_node(
            member.member_id,
            blocks=member.size,
            host=member.host,
            setting=member.setting,
            landing_bytes=member.landing_bytes,
            claim_s=self.scenario.claim_s,
            hold_s=self.scenario.hold_s,
        )
        assert isinstance(node.index, WatchedIndex)
        node.index.slab = node.slab
        if self.scenario.flash:
            self._give_flash(node)

    def _give_flash(self, node: SimNode) -> None:
        """A new disk, or the one that its last life left: killed, or without power."""
        disk = self.disks.get(node.member_id)
        if disk is None:
            disk = self.disks[node.member_id] = MemoryDisk()
            worn = self._luck.random() < 0.2
            disk.refuses = lambda what, name: self._refuse(disk, what) if worn else None
        elif self._luck.random() < 0.5:
            lose_power(disk, self._luck)
        self._starting = True
        give_flash(node, disk, self._luck.randrange(1 << 30))
        self._starting = False

    def _refuse(self, disk: MemoryDisk, what: str) -> str | None:
        """Fail one operation in twenty, but none of a start: that would only be a node without."""
        if self._starting or self._luck.random() > 0.05:
            return None
        return "Input/output error" if what in ("read", "sync") else "No space left on device"

    async def start_worker(self, member: Member) -> None:
        """Start a worker, and let the gateway hear of it."""
        serve = partial(
            live,
            self.sim,
            member,
            window=self.scenario.window,
            claim_s=self.scenario.claim_s,
            audits=self.scenario.audits,
            around=self._disturbance.around,
        )
        life = self.lives[member.member_id] = await self.tasks.start(serve)
        peer = Peer(
            role=life.role,
            member_id=member.member_id,
            start_id=life.hello.start_id,
            host_id=life.hello.host_id,
            pid=life.hello.pid,
            state="ready",
            started_s=anyio.current_time(),
            address=member.member_id,
        )
        self.view.table.saw_presence(peer, anyio.current_time())

    def _stores(self) -> list[StoreClient]:
        return [
            *self.gateway_stores,
            *(life.worker.store for life in self.lives.values() if life.alive),
        ]

    def _tell(self, store: StoreClient, nodes: list[StoreNode]) -> None:
        """News of nodes comes to each member in its own time."""
        self.tasks.start_soon(self._tell_later, store, self.rng.choice([0.0, 0.3, 3.0]))

    async def _tell_later(self, store: StoreClient, most_s: float) -> None:
        await anyio.sleep(most_s * self.rng.random())
        if store in self._stores():
            store.set_nodes(self.sim.view(alive_only=True))

    def _tell_node(self, node: SimNode, nodes: list[StoreNode]) -> None:
        self.tasks.start_soon(self._tell_node_later, node, self.rng.choice([0.0, 0.3, 3.0]))

    async def _tell_node_later(self, node: SimNode, most_s: float) -> None:
        await anyio.sleep(most_s * self.rng.random())
        if node.alive:
            node.node.set_nodes(self.sim.view(alive_only=True))

    async def _loads(self) -> None:
        while True:
            for life in self.lives.values():
                if life.alive and not life.hung:
                    now_s = anyio.current_time()
                    self.view.table.saw_load(life.hello.start_id, life.load(), now_s)
            await anyio.sleep(LOAD_S)

    def share(self) -> None:
        """Let the news of which nodes there are set out."""
        for store in self._stores():
            self._tell(store, [])
        for node in self.sim.nodes.values():
            if node.alive:
                self._tell_node(node, [])
