"""Store nodes with a second tier: what only flash has is served, staged, handed over and erased."""

from __future__ import annotations

import random

import anyio
import pytest
import trio.testing

from flash_sim import give_flash, lose_power
from kvass.common.errors import Unavailable
from kvass.common.transport.route import Setting
from kvass.kvstore import messages as m
from memory_disk import MemoryDisk
from store_sim import SPACE, Cluster, SimNode, Worker, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
BLOCKS = 12
CHAINS = 5  # two and a half times what the memory of a small node holds
SMALL = 24


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


def start(
    sim: Cluster,
    disk: MemoryDisk,
    setting: Setting = "auto",
    *,
    blocks: int = SMALL,
    read_s: float = 0.0,
) -> SimNode:
    node = sim.add_node("store-0", setting=setting, blocks=blocks)
    give_flash(node, disk, seed=len(disk.files), read_s=read_s)
    return node


async def fill(worker: Worker, node: SimNode, chains: int = CHAINS) -> None:
    """Put chains and ask for each, so that all of them are on flash, more than memory holds."""
    for seed in range(chains):
        await push(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS))
        await worker.store.lookup(chain_of(BLOCKS, seed=seed), [(0, BLOCKS)], deadline_s=1)
        await anyio.sleep(0.2)
    assert node.node.counts()["flash_blocks"] >= (chains - 1) * BLOCKS


async def test_a_working_set_larger_than_memory_is_served(way: Setting) -> None:
    async with cluster() as sim:
        node = start(sim, MemoryDisk(), way)
        worker = sim.add_worker(setting=way)
        await fill(worker, node)
        for seed in range(CHAINS - 1):
            chain = chain_of(BLOCKS, seed=seed)
            assert await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1) == [(0, BLOCKS)]
            assert await pull(worker, chain, range(BLOCKS)) == set(range(BLOCKS))
        counts = await at_rest(sim)
        assert counts["evictions"] and counts["flash_hits"] and counts["flash_risen"]
        assert counts["misses"] == 0


@pytest.mark.parametrize("by", ["nobody", "lookup"])
async def test_what_is_staged_is_pulled_without_waiting_for_the_disk(by: str, way: Setting) -> None:
    async with cluster() as sim:
        disk = MemoryDisk()
        node = start(sim, disk, way)
        worker = sim.add_worker(setting=way)
        await fill(worker, node)
        sim.kill_node("store-0")
        await anyio.sleep(2)
        node = start(sim, disk, way, blocks=128, read_s=0.1)
        chain, ranges = chain_of(BLOCKS, seed=1), [(0, 3)]
        stage_s = 1.0 if by == "lookup" else 0.0
        found = await worker.store.lookup(chain, ranges, deadline_s=1, stage_s=stage_s)
        assert found == ranges
        await anyio.sleep(0.7)
        begun_s = anyio.current_time()
        assert await pull(worker, chain, range(3)) == {0, 1, 2}
        waited_s = anyio.current_time() - begun_s
        assert waited_s >= 0.05 if by == "nobody" else waited_s < 0.05
        assert node.node.counts()["flash_staged"] == (0 if by == "nobody" else 3)


async def test_after_a_power_cut_what_was_synced_is_served() -> None:
    async with cluster() as sim:
        disk = MemoryDisk()
        node = start(sim, disk)
        worker = sim.add_worker()
        await fill(worker, node)
        tiers = node.node._tiers
        assert tiers is not None
        await tiers.sync()
        sure = tiers.found([key for n in range(CHAINS) for key in chain_of(BLOCKS, seed=n).keys])
        sim.kill_node("store-0")
        lose_power(disk, random.Random(1))
        await anyio.sleep(2)
        start(sim, disk)
        for seed in range(CHAINS):
            chain = chain_of(BLOCKS, seed=seed)
            there = await pull(worker, chain, range(BLOCKS))
            assert there >= {index for index, key in enumerate(chain.keys) if key in sure}


async def test_a_drain_hands_over_what_only_flash_has() -> None:
    async with cluster() as sim:
        node = start(sim, MemoryDisk())
        worker = sim.add_worker()
        await fill(worker, node)
        held = [
            (seed, i)
            for seed in range(CHAINS)
            for i, key in enumerate(chain_of(BLOCKS, seed=seed).keys)
            if node.index.ledger.visible(key)
            or (node.node._tiers and node.node._tiers.found([key]))
        ]
        assert len(held) > SMALL
        sim.add_node("store-1", blocks=256)
        sim.share_view()
        node.node.drain()
        with anyio.fail_after(60):
            assert await node.node.leaving.over() == 0
        sim.kill_node("store-0")
        for seed in range(CHAINS):
            wanted = [i for n, i in held if n == seed]
            assert await pull(worker, chain_of(BLOCKS, seed=seed), wanted) == set(wanted)


async def test_a_drain_says_what_it_could_not_read() -> None:
    async with cluster() as sim:
        disk = MemoryDisk()
        node = start(sim, disk)
        worker = sim.add_worker()
        await fill(worker, node)
        sim.add_node("store-1", blocks=256)
        sim.share_view()
        disk.refuses = lambda what, name: "Input/output error" if what == "read" else None
        node.node.drain()
        with anyio.fail_after(120):
            assert await node.node.leaving.over() > 0


async def test_a_drop_says_that_a_dead_disk_was_not_erased() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        assert node.node.counts().get("flash_off") is None
        node.node.lose_flash("flash: cannot use /mnt/x: Input/output error")
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS), tenant="a")
        assert node.node.counts()["flash_off"] == 1
        with pytest.raises(Unavailable, match=r"12 blocks were erased, but not those on .*store-0"):
            await worker.store.drop(tenant="a")
        assert await pull(worker, chain, range(BLOCKS)) == set(), "memory was erased"


async def test_a_drop_on_a_failing_disk_erases_memory_and_says_the_rest() -> None:
    async with cluster() as sim:
        disk = MemoryDisk()
        node = start(sim, disk)
        worker = sim.add_worker()
        await fill(worker, node)
        disk.refuses = lambda what, name: "Input/output error" if what == "write" else None
        with pytest.raises(Unavailable, match="Input/output error"):
            await worker.store.drop(namespace=SPACE)
        assert node.index.counts()["visible_blocks"] == 0
        disk.refuses = lambda what, name: None
        await worker.store.drop(namespace=SPACE)
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()
        sim.kill_node("store-0")
        await anyio.sleep(2)
        assert start(sim, disk).node.counts()["flash_blocks"] == 0


async def test_a_drop_erases_both_tiers_and_counts_each_block_once() -> None:
    async with cluster() as sim:
        disk = MemoryDisk()
        node = start(sim, disk, blocks=40)
        worker = sim.add_worker()
        await fill(worker, node, 2)
        assert node.index.counts()["visible_blocks"] == 2 * BLOCKS, "all in memory, some on flash"
        assert await worker.store.drop(namespace=SPACE) == 2 * BLOCKS
        sim.kill_node("store-0")
        await anyio.sleep(2)
        again = start(sim, disk)
        assert again.node.counts()["flash_blocks"] == 0


async def test_a_barred_writer_s_blocks_leave_flash() -> None:
    async with cluster() as sim:
        node = start(sim, MemoryDisk())
        worker = sim.add_worker()
        await fill(worker, node)
        link = worker.store.router.links()[0]
        await link.call(m.Bar(writer=worker.hello.member_id), deadline_s=1)
        assert node.node.counts()["flash_blocks"] == 0
