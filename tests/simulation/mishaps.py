"""Mishaps as a scenario has them, done to the members: deaths, stops, cuts, splits, erasures."""

from __future__ import annotations

import anyio

from kvass.common.errors import KvassError
from kvass.kvstore.client import StoreClient
from lives import Life
from members import Members
from record import Record
from scenario import Mishap
from store_sim import SimNode
from wires import Wire

LOOK_S = 0.004  # between two looks whether something is being read


class Mishaps:
    """Does mishaps and ends them. `store` is an operator's client. Mutable field: the members."""

    def __init__(self, members: Members, store: StoreClient, record: Record) -> None:
        self._members = members
        self._sim = members.sim
        self._store = store
        self._record = record

    async def happen(self, mishap: Mishap) -> None:
        """Let one mishap happen, and end."""
        await anyio.sleep(mishap.at_s)
        self._record.note(f"{mishap.kind} {mishap.member_id} for {mishap.lasts_s:.3f} s")
        self._record.count(mishap.kind)
        if mishap.member_id in self._sim.nodes:
            await self._hurt_store(mishap)
        else:
            await self._hurt_worker(mishap, self._members.lives[mishap.member_id])
        self._record.note(f"{mishap.kind} {mishap.member_id} is over")

    async def _hurt_store(self, mishap: Mishap) -> None:
        node = self._sim.nodes[mishap.member_id]
        if not node.alive:
            return
        if mishap.kind == "cut":
            _cut(node.wires)
        elif mishap.kind == "drop":
            await self._drop_what_is_read(node, mishap.lasts_s)
        elif mishap.kind == "hang":
            self._sim.hang_node(mishap.member_id, True)
            await anyio.sleep(mishap.lasts_s)
            if node.alive:
                self._sim.hang(node.identity.start_id, node.wires, False)
        else:
            self._sim.kill_node(mishap.member_id)
            self._members.share()
            await anyio.sleep(mishap.lasts_s)
            members = {each.member_id: each for each in self._members.scenario.stores}
            self._members.start_store(members[mishap.member_id])
            self._members.share()

    async def _drop_what_is_read(self, node: SimNode, within_s: float) -> None:
        ends_s = anyio.current_time() + within_s
        while anyio.current_time() < ends_s:
            leased = [
                entry for lease in node.index.leases._leases.values() for entry in lease.entries
            ]
            if leased:
                try:
                    await self._store.drop(
                        keys=[entry.header.key for entry in leased], deadline_s=1
                    )
                except KvassError:
                    self._record.note("somebody could not be told to drop blocks")
            await anyio.sleep(LOOK_S)

    async def _hurt_worker(self, mishap: Mishap, life: Life) -> None:
        if not life.alive:
            return
        if mishap.kind == "cut":
            _cut(life.wires)
        elif mishap.kind == "split":
            nodes = self._sim.view(alive_only=True)
            life.worker.store.set_nodes(
                self._members.rng.sample(nodes, self._members.rng.randrange(len(nodes) + 1))
            )
            await anyio.sleep(mishap.lasts_s)
            if life.alive:
                life.worker.store.set_nodes(self._sim.view(alive_only=True))
        elif mishap.kind == "hang":
            self._hang(life, True)
            await anyio.sleep(mishap.lasts_s)
            self._hang(life, False)
        else:
            self._kill(life)
            await anyio.sleep(mishap.lasts_s)
            await self._members.start_worker(life.member)

    def _hang(self, life: Life, hung: bool) -> None:
        if life.alive:
            life.hung = hung
            life.compute.hang(hung)
            self._sim.hang(life.hello.start_id, life.wires, hung)

    def _kill(self, life: Life) -> None:
        """Kill -9: no word to anybody; the broker says so a while later, or silence does."""
        life.alive = False
        self._sim.kill_worker(life.worker)
        self._sim.workers.remove(life.worker)
        life.tasks.cancel_scope.cancel()
        life.compute.hang(False)
        self._members.tasks.start_soon(self._gone, life.hello.start_id)

    async def _gone(self, start_id: str) -> None:
        await anyio.sleep(6.0 * self._members.rng.random())
        self._members.view.table.saw_gone(start_id)


def _cut(wires: list[Wire]) -> None:
    for wire in list(wires):
        wire.cut()
