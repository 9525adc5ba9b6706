"""Mishaps as a scenario has them, done to the members: deaths, stops, cuts, splits, erasures, and
what operators do to store nodes: drains, new ones, erasures again, crowds of readers."""

from __future__ import annotations

from typing import Any, cast

import anyio

from kvass.common.errors import KvassError
from kvass.common.keys import Chain
from kvass.decode.loop import DecodeLoop
from kvass.kvstore import messages as m
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.erasure import Criteria
from kvass.kvstore.node.copies.handover import DRAIN_IDLE_S, spans_of_entries
from lives import Life
from members import Members
from record import Record
from scenario import Mishap
from store_sim import SPACE, SimNode
from wires import Wire

LOOK_S = 0.004  # between two looks whether something is being read
CROWD_S = 0.02  # between two of a crowd
AIM_S = 2.0  # a kill is late by so much at most
DRAIN_S = 8 * DRAIN_IDLE_S  # of a drain whose blocks go one by one, to a node that hangs at times


class Mishaps:
    """Does mishaps and ends them. `store` is an operator's client. Mutable field: the members."""

    def __init__(self, members: Members, store: StoreClient, record: Record) -> None:
        self._members = members
        self._sim = members.sim
        self._store = store
        self._record = record
        self._erasing = anyio.Lock()

    async def happen(self, mishap: Mishap) -> None:
        """Let one mishap happen, and end."""
        await anyio.sleep(mishap.at_s)
        self._record.note(f"{mishap.kind} {mishap.member_id} for {mishap.lasts_s:.3f} s")
        self._record.count(mishap.kind)
        if mishap.kind == "join":
            self._start(mishap.member_id)
        elif mishap.member_id in self._sim.nodes:
            await self._hurt_store(mishap)
        elif mishap.member_id not in self._members.lives:
            self._record.note(f"{mishap.member_id} has not joined yet")
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
        elif mishap.kind == "split":
            await self._split(node, mishap.lasts_s)
        elif mishap.kind == "erase":
            await self._erase_widely(mishap.lasts_s)
        elif mishap.kind == "crowd":
            await self._crowd(node, mishap.lasts_s)
        elif mishap.kind == "drain":
            await self._drain(node, mishap.lasts_s)
        else:
            await self._kill_store(node, mishap.lasts_s)

    async def _kill_store(self, node: SimNode, away_s: float) -> None:
        prober = self._members.prober
        copied, known = prober.copied(node), self._sim.view(alive_only=True)
        self._sim.kill_node(node.member_id)
        self._members.share()
        if copied:
            await prober.read(copied, known)
        await anyio.sleep(away_s)
        self._start(node.member_id)

    def _start(self, member_id: str) -> None:
        """Start a store node, with nothing in it."""
        known = self._sim.nodes.get(member_id)
        if known is None or not known.alive:
            members = {each.member_id: each for each in self._members.scenario.stores}
            self._members.start_store(members[member_id])
            self._members.share()

    async def _drain(self, node: SimNode, away_s: float) -> None:
        """Let a node hand over and leave, and come back as a new one."""
        others = [each.member_id for each in node.node._handover._place.nodes]
        try:
            await self._store.drain(node.member_id)
        except KvassError:
            return
        self._members.share()
        left = None
        with anyio.move_on_after(DRAIN_S):
            left = await node.node.leaving.over()
        if not node.alive:
            return
        assert left is not None, f"{node.member_id} still drains after {DRAIN_S} s"
        self._record.note(f"{node.member_id} drained: {left} left")
        if left == 0 and others != [node.member_id]:
            self._members.prober.check_handover(node)
        self._sim.kill_node(node.member_id)
        self._members.share()
        await anyio.sleep(away_s)
        self._start(node.member_id)

    async def _split(self, node: SimNode, lasts_s: float) -> None:
        nodes, rng = self._sim.view(alive_only=True), self._members.rng
        others = [each for each in nodes if each.member_id != node.member_id]
        seen = {each.member_id for each in rng.sample(others, rng.randrange(len(others) + 1))}
        seen.add(node.member_id)
        node.node.set_nodes([each for each in nodes if each.member_id in seen])
        await anyio.sleep(lasts_s)
        if node.alive:
            node.node.set_nodes(self._sim.view(alive_only=True))

    async def _crowd(self, node: SimNode, lasts_s: float) -> None:
        """Look up what a node has, again and again; nobody else's segments are so hot."""
        ends_s = anyio.current_time() + lasts_s
        while anyio.current_time() < ends_s and node.alive:
            entries = [e for e in node.index.ledger.entries.values() if e.state == "visible"]
            for span in spans_of_entries(entries)[:1]:
                ranges = [(span.first, span.first + len(span))]
                chain = cast(Chain, m.Piece(span))
                await self._store.lookup(chain, ranges, deadline_s=1)
            await anyio.sleep(CROWD_S)

    async def _erase_widely(self, within_s: float) -> None:
        """Erase what one worker wrote, or everything of a model: while a node takes copies, if one
        does so in time."""
        for _ in range(int(within_s / LOOK_S)):
            if self._is_copied():
                break
            await anyio.sleep(LOOK_S)
        workers = sorted(self._members.lives)
        writer = self._members.rng.choice(["", *workers])
        await self._erase(**({"writer": writer} if writer else {"namespace": SPACE}))

    def _is_copied(self) -> bool:
        nodes = self._sim.nodes.values()
        return any(node.alive and node.node._filler._queued for node in nodes)

    async def _erase(self, **what: Any) -> None:
        """Erase, and say whether it was done at every node that there was all the while."""
        async with self._erasing:
            before = self._known()
            keys = frozenset(what["keys"]) if "keys" in what else None
            self._members.history.begin_erasure(Criteria(**{**what, "keys": keys}))
            try:
                await self._store.drop(**what, deadline_s=2)
            except KvassError:
                self._record.note("somebody could not be told to drop blocks")
                before = None
            whole = before is not None and before == self._known()
            nodes = [node.index for node in self._sim.nodes.values() if node.alive]
            self._members.history.end_erasure(nodes, whole=whole)
            self._record.count("erased everywhere", whole)

    def _known(self) -> set[str] | None:
        """Return the start ids of all nodes, if the operator knows all of them, and none is away
        that has blocks on its disk."""
        if any(self._members.disks and not node.alive for node in self._sim.nodes.values()):
            return None
        alive = {node.member_id: node for node in self._sim.nodes.values() if node.alive}
        known = {link.node.member_id for link in self._store._router.links()}
        starts = {node.identity.start_id for node in alive.values()}
        return starts if known == alive.keys() else None

    async def _drop_what_is_read(self, node: SimNode, within_s: float) -> None:
        ends_s = anyio.current_time() + within_s
        while anyio.current_time() < ends_s:
            leased = [
                entry for lease in node.index.leases._leases.values() for entry in lease.entries
            ]
            if leased:
                await self._erase(keys=[entry.header.key for entry in leased])
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
            await _busy(life)
            if not life.alive:
                return
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


async def _busy(life: Life) -> None:
    """Wait for a while until a worker has something to lose: decode, a stream that has begun."""

    def has_begun() -> bool:
        if isinstance(life.loop, DecodeLoop):
            there = life.loop.scheduler.admitted
            return any(len(each.tokens) > each.request.prompt_length + 1 for each in there)
        return bool(life.load()["running"])

    with anyio.move_on_after(AIM_S):
        while life.alive and not has_begun():  # noqa: ASYNC110 (nothing tells of it)
            await anyio.sleep(LOOK_S)


def _cut(wires: list[Wire]) -> None:
    for wire in list(wires):
        wire.cut()
