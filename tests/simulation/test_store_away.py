"""Nodes that are away while something is erased: whoever comes back brings nothing of it back."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest
import trio.testing

from flash_sim import give_flash, lose_power
from kvass.common.errors import Unavailable
from kvass.common.keys import Chain
from kvass.kvstore.client import erase
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.erasure import KEPT_MAX
from kvass.kvstore.index.erasures import MARK_S
from kvass.kvstore.node.copies.exchange import OWED_S, PATIENCE_S, ROUND_S
from kvass.kvstore.placement import Placement, StoreNode
from memory_disk import MemoryDisk
from store_sim import Cluster, SimNode, Worker, chain_of, pull, push
from wires import Fate

pytestmark = pytest.mark.anyio
BLOCKS = 8
SMALL = 24  # blocks in a node's memory: a third of what it gets
NAMES = ("store-0", "store-1", "store-2")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@dataclass
class Stage:
    """Nodes with disks that outlive them, of whom everybody knows those that run. Mutable fields:
    `disks`, `started_s` (when a node did last), `wrong` (what was served and must not be)."""

    sim: Cluster
    worker: Worker
    disks: dict[str, MemoryDisk] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    started_s: float = 0.0

    def start(self, name: str, *, flash: bool = True, blocks: int = SMALL) -> SimNode:
        node = self.sim.add_node(name, host=f"host-{name}", blocks=blocks)
        self.started_s = anyio.current_time()
        if flash:
            disk = self.disks.setdefault(name, MemoryDisk())
            give_flash(node, disk, seed=len(disk.files))
        return node

    def kill(self, name: str) -> None:
        self.sim.kill_node(name)
        self.sim.share_view()

    async def fill(self, chains: Sequence[Chain], tenant: str) -> None:
        """Put chains and ask for each, so that nearly all of them go to flash."""
        for chain in chains:
            await push(self.worker, chain, range(BLOCKS), tenant=tenant)
            await self.worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
            await anyio.sleep(0.2)

    def below(self, name: str, chains: Sequence[Chain]) -> set[bytes]:
        """Return which blocks a node's log holds, served or not."""
        tiers = self.sim.nodes[name].node._tiers
        assert tiers is not None
        keys = [key for chain in chains for key in chain.keys]
        places = tiers._log.catalog.find(keys)
        return {key for key, place in zip(keys, places, strict=True) if place}

    async def watch(self, erased: Sequence[Chain]) -> None:
        """Ask for what was erased, all the time; often where a node has just come."""
        while True:
            for number, chain in enumerate(erased):
                found = await self.worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
                there = await pull(self.worker, chain, range(BLOCKS))
                if found or there:
                    self.wrong.append(f"chain {number}: found {found}, got {there}")
            late = anyio.current_time() - self.started_s > 2.0
            await anyio.sleep(1.0 if late else 0.05)


@asynccontextmanager
async def stage(replicas: int = 1, slow: random.Random | None = None) -> AsyncIterator[Stage]:
    """`slow` draws how late nodes hear each other, up to a fifth of a second a frame."""

    def weather(source: str, target: str) -> Fate:
        between_nodes = source in NAMES and target in NAMES
        return Fate(slow.random() / 5) if slow is not None and between_nodes else Fate()

    async with anyio.create_task_group() as tasks:

        def tell(store: StoreClient, nodes: list[StoreNode]) -> None:
            store.set_nodes([node for node in nodes if sim.nodes[node.member_id].alive])

        def tell_node(node: SimNode, nodes: list[StoreNode]) -> None:
            node.set_nodes([node for node in nodes if sim.nodes[node.member_id].alive])

        sim = Cluster(tasks, replicas=replicas, tell=tell, tell_node=tell_node, weather=weather)
        yield Stage(sim, sim.add_worker())
        sim.check()
        tasks.cancel_scope.cancel()


def chains_of(tenant: str, count: int = 6) -> list[Chain]:
    salt = tenant.encode()
    return [chain_of(BLOCKS, seed=seed, salt=salt) for seed in range(count)]


@pytest.mark.parametrize("seed", range(16))
async def test_who_was_away_brings_nothing_back(seed: int) -> None:
    rng = random.Random(seed)
    async with stage(rng.choice((1, 2)), random.Random(seed)) as cluster:
        for name in NAMES:
            cluster.start(name)
        alice, bob = chains_of("alice"), chains_of("bob")
        for ours, theirs in zip(alice, bob, strict=True):
            await cluster.fill([ours], "alice")
            await cluster.fill([theirs], "bob")
        has = [name for name in NAMES if cluster.below(name, alice)]
        away = rng.sample(has, min(rng.choice((1, 1, 2)), len(has)))
        kept = {name: cluster.below(name, bob) for name in away}
        for name in away:
            cluster.kill(name)
            if rng.random() < 0.5:
                lose_power(cluster.disks[name], rng)
                kept[name] = set()  # some of it may be lost
        await cluster.worker.store.drop(tenant="alice")
        fresh = alice.pop()
        await anyio.sleep(1.0)  # copies that were under way have been given up
        again = await push(cluster.worker, fresh, range(BLOCKS), tenant="alice")
        assert again == ((0, BLOCKS),)
        for name in set(NAMES) - set(away):  # who heard forgets nothing by its own death
            if rng.random() < 0.5:
                cluster.kill(name)
                cluster.start(name)
                again = ()
        await anyio.sleep(rng.choice((0.0, 1.0, 100.0)))
        async with anyio.create_task_group() as readers:
            readers.start_soon(cluster.watch, alice)
            for name in away:
                await anyio.sleep(rng.random())
                cluster.start(name)
            await anyio.sleep(2 * ROUND_S)
            readers.cancel_scope.cancel()
        assert cluster.wrong == []
        for name in away:
            assert cluster.below(name, alice) == set(), "it is erased, not hidden"
            assert cluster.below(name, bob) >= kept[name], "and nothing else is"
        if again:
            nodes = [cluster.sim.nodes[name] for name in set(NAMES) - set(away)]
            there = {key for node in nodes for key in node.index.ledger.entries}
            assert there >= set(fresh.keys), "what was written after it is new"


async def test_a_newcomer_tells_what_the_others_have_not_heard() -> None:
    async with stage() as cluster:
        for name in NAMES:
            cluster.start(name)
        alice = chains_of("alice", 9)
        await cluster.fill(alice, "alice")
        for name in NAMES[1:]:
            cluster.kill(name)
        await cluster.worker.store.drop(tenant="alice")
        cluster.kill("store-0")
        for name in NAMES[1:]:  # nobody who heard is up
            cluster.start(name)
        await anyio.sleep(1)
        assert any(cluster.below(name, alice) for name in NAMES[1:])
        cluster.start("store-0")
        await anyio.sleep(1)
        for name in NAMES:
            assert cluster.below(name, alice) == set()
        for chain in alice:
            assert await pull(cluster.worker, chain, range(BLOCKS)) == set()


async def test_it_is_told_further_by_who_was_told() -> None:
    """And nobody who keeps it needs a disk."""
    async with stage() as cluster:
        cluster.start("store-0")
        cluster.start("store-1", flash=False)
        alice = chains_of("alice", 9)
        await cluster.fill(alice, "alice")
        assert cluster.below("store-0", alice)
        cluster.kill("store-0")
        await cluster.worker.store.drop(tenant="alice")
        cluster.start("store-2", flash=False)
        await anyio.sleep(1)
        cluster.kill("store-1")
        cluster.start("store-0")
        await anyio.sleep(1)
        assert cluster.below("store-0", alice) == set()


async def test_what_is_written_at_a_node_that_has_heard_is_new_and_stays_through_restarts() -> None:
    async with stage() as cluster:
        for name in NAMES[:2]:
            cluster.start(name)
        alice = chains_of("alice", 9)
        await cluster.fill(alice, "alice")
        await cluster.worker.store.drop(tenant="alice")
        await cluster.fill(alice, "alice")
        anew = {name: cluster.below(name, alice) for name in NAMES[:2]}
        assert all(anew.values())
        for name in NAMES[:2]:
            cluster.kill(name)
            cluster.start(name)
            await anyio.sleep(2 * ROUND_S)
            assert cluster.below(name, alice) == anew[name]
        counts = [node.node.counts() for node in cluster.sim.nodes.values()]
        assert [each["erasures_told"] for each in counts] == [0, 0]


async def test_flash_is_closed_until_another_node_answers() -> None:
    async with stage() as cluster:
        for name in NAMES[:2]:
            cluster.start(name)
        alice = chains_of("alice", 9)
        await cluster.fill(alice, "alice")
        cluster.kill("store-0")
        cluster.sim.hang_node("store-1", True)
        node = cluster.start("store-0")
        await anyio.sleep(PATIENCE_S + 5)
        assert node.node.counts()["flash_closed"] == 1
        cluster.sim.hang_node("store-1", False)
        await anyio.sleep(2)
        assert node.node.counts()["flash_closed"] == 0
        assert cluster.below("store-0", alice)


async def test_one_that_does_not_answer_closes_flash_only_for_a_while() -> None:
    async with stage() as cluster:
        for name in NAMES:
            cluster.start(name)
        await cluster.fill(chains_of("alice", 9), "alice")
        cluster.kill("store-0")
        cluster.sim.hang_node("store-1", True)
        node = cluster.start("store-0")
        await anyio.sleep(PATIENCE_S / 2)
        assert node.node.counts()["flash_closed"] == 1
        await anyio.sleep(PATIENCE_S)
        assert node.node.counts()["flash_closed"] == 0


@pytest.mark.parametrize("erasures", [KEPT_MAX - 1, KEPT_MAX])
async def test_who_was_away_longer_than_erasures_are_kept_has_nothing_left(
    erasures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as cluster:
        for name in NAMES[:2]:
            cluster.start(name)
        alice, bob = chains_of("alice"), chains_of("bob")
        await cluster.fill([*alice, *bob], "bob")
        cluster.kill("store-0")
        await cluster.worker.store.drop(tenant="alice")
        for number in range(erasures):
            await cluster.worker.store.drop(tenant=f"nobody {number}")
        node = cluster.start("store-0")
        await anyio.sleep(2)
        kept = erasures < KEPT_MAX
        assert bool(cluster.below("store-0", bob)) is kept
        assert (node.node.counts()["erasures_discarded"] == 0) is kept
        assert node.node.counts()["flash_closed"] == 0
        assert cluster.below("store-1", bob), "who was there keeps what it has"


async def test_what_a_disk_would_not_erase_is_not_served_and_erased_later() -> None:
    async with stage() as cluster:
        node = cluster.start("store-0")
        alice = chains_of("alice", 9)
        await cluster.fill(alice, "alice")
        disk = cluster.disks["store-0"]
        disk.refuses = lambda what, name: "Input/output error"
        with pytest.raises(Unavailable, match="Input/output error"):
            await cluster.worker.store.drop(tenant="alice")
        assert node.node.counts()["erasures_owed"] == 1
        await anyio.sleep(MARK_S + 10)
        disk.refuses = lambda what, name: None
        assert cluster.below("store-0", alice)
        for chain in alice:
            assert await pull(cluster.worker, chain, range(BLOCKS)) == set()
        await anyio.sleep(2 * OWED_S)
        assert node.node.counts()["erasures_owed"] == 0
        assert cluster.below("store-0", alice) == set()
        assert node.node.counts()["flash_closed"] == 0


# --- a barred writer ---


def homes(cluster: Stage, chain: Chain) -> list[str]:
    place = Placement(cluster.sim.view())
    return [place.order(chain.segment_key(i))[0].member_id for i in range(len(chain.keys))]


async def put_below(cluster: Stage, worker: Worker, chain: Chain, part: range) -> None:
    """Put blocks so that only flash has them in the end."""
    await push(worker, chain, part)
    await cluster.worker.store.lookup(chain, [(part.start, part.stop)], deadline_s=1)
    await anyio.sleep(0.3)


async def test_what_was_computed_upon_a_barred_writers_blocks_leaves_flash_too() -> None:
    """Some of the chain is in memory, some on flash alone, some on the other node; what is upon it
    follows from either."""
    async with stage() as cluster:
        nodes = [cluster.start(name) for name in NAMES[:2]]
        right, wrong = cluster.sim.add_worker("prefill-1"), cluster.sim.add_worker("prefill-2")
        chain, other = chain_of(112), chain_of(8, seed=9)
        assert len(set(homes(cluster, chain))) == 2
        await put_below(cluster, right, chain, range(0, 4))
        await put_below(cluster, wrong, chain, range(4, 8))
        for first in range(8, 112, 8):
            await put_below(cluster, right, chain, range(first, first + 8))
        await put_below(cluster, right, other, range(8))
        below = cluster.below("store-0", [chain]) | cluster.below("store-1", [chain])
        above = {key for node in nodes for key in node.index.ledger.entries}
        assert len(below - above) > 32, "flash alone has them"
        await erase.bar(right.store.router, "prefill-2", 5.0)
        bad = set(chain.keys[4:])
        for node in nodes:
            assert not bad & node.index.ledger.entries.keys()
            assert not bad & cluster.below(node.member_id, [chain])
        # What is no descendant stays.
        assert await pull(right, other, range(8)) == set(range(8))
        assert await pull(right, chain, range(4)) == set(range(4))


async def test_a_bar_reaches_who_was_away_and_what_follows_from_there() -> None:
    async with stage() as cluster:
        for name in NAMES[:2]:
            cluster.start(name, blocks=200)
        right, wrong = cluster.sim.add_worker("prefill-1"), cluster.sim.add_worker("prefill-2")
        chain = next(
            each
            for each in (chain_of(96, seed=seed) for seed in range(99))
            if [homes(cluster, each)[i] for i in (0, 32, 64)] == ["store-1", "store-0", "store-1"]
        )
        await push(wrong, chain, range(32))
        await push(right, chain, range(32, 96))
        for node in cluster.sim.nodes.values():
            tiers = node.node._tiers
            assert tiers is not None
            tiers.asked(list(node.index.ledger.entries))
            while tiers._waiting:
                await tiers.sink()
        cluster.kill("store-0")
        await erase.bar(right.store.router, "prefill-2", 5.0)
        cluster.start("store-0")
        await anyio.sleep(3 * ROUND_S)
        assert cluster.below("store-0", [chain]) == set()
        assert cluster.below("store-1", [chain]) == set()
        assert await push(wrong, chain_of(64, seed=5), range(8)) == (), "it is barred there, too"
