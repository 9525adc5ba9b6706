"""Nodes with a third tier: what only the bucket has is found, brought up, bounded and erased."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import trio.testing
from prometheus_client import CollectorRegistry

from kvass.common.transport.route import Setting
from kvass.kvstore import messages as m
from kvass.kvstore.node.observe import Observer
from kvass.kvstore.node.tiers import bucket
from memory_disk import MemoryDisk
from objects_sim import (
    ALL,
    BLOCK_BYTES,
    BLOCKS,
    CHAINS,
    MemoryObjects,
    again,
    fill,
    start,
    tier,
    until,
)
from store_sim import SPACE, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.mark.parametrize("setting", ["auto", "tcp"])
async def test_a_node_that_lost_everything_serves_what_the_bucket_has(setting: Setting) -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node = start(sim, objects, setting=setting)
        worker = sim.add_worker(setting=setting)
        await fill(worker)
        assert len(objects.stored) == CHAINS, "one object a segment"
        node = await again(sim, objects, setting=setting, blocks=64)
        assert node.node.counts()["bucket_blocks"] == CHAINS * BLOCKS
        calls = objects.calls.total()
        for seed in range(CHAINS):
            chain = chain_of(BLOCKS, seed=seed)
            assert await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1) == [(0, BLOCKS)]
            assert objects.calls.total() == calls, "a lookup asks nobody"
            assert await pull(worker, chain, range(BLOCKS)) == ALL
            calls += 1
            assert objects.calls.total() == calls, "a segment is one request"
        counts = await at_rest(sim)
        assert counts["bucket_risen"] == counts["bucket_hits"] == CHAINS * BLOCKS
        assert counts["misses"] == 0
        registry = CollectorRegistry()
        Observer(registry).update(counts)
        sizes = {"bucket_read_bytes": "read", "bucket_written_bytes": "written"}
        for name, way in sizes.items():
            shown = registry.get_sample_value("kvass_store_bucket_moved_bytes_total", {"way": way})
            assert shown == counts[name]
        hits = registry.get_sample_value("kvass_store_hits_total", {"tier": "bucket"})
        blocks = registry.get_sample_value("kvass_store_tier_blocks", {"tier": "bucket"})
        assert hits == blocks == CHAINS * BLOCKS


async def test_a_lookup_names_the_tier_and_what_is_staged_is_there_before_the_pull() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        node = await again(sim, objects, blocks=128)
        objects.waits_s = 0.1
        chain = chain_of(BLOCKS, seed=1)
        link = worker.store.router.links()[0]
        reply = await link.call(m.Lookup(spans=tuple(m.spans_of(chain, [(2, 6)]))), deadline_s=1)
        assert (reply.visible, reply.on_flash, reply.in_bucket) == (((2, 6),), (), ((2, 6),))
        await worker.store.lookup(chain, [(2, 6)], deadline_s=1, stage_s=1.0)
        await anyio.sleep(0.5)
        begun_s = anyio.current_time()
        assert await pull(worker, chain, range(2, 6)) == {2, 3, 4, 5}
        assert anyio.current_time() - begun_s < 0.1
        counts = node.node.counts()
        assert counts["bucket_staged"] == 4 and counts["bucket_read_bytes"] == 4 * BLOCK_BYTES


@pytest.mark.parametrize("copies", [1, 2])
async def test_several_nodes_share_a_bucket_and_each_block_is_put_once(copies: int) -> None:
    async with cluster(replicas=copies) as sim:
        objects = MemoryObjects()
        for number in range(3):
            start(sim, objects, f"store-{number}", host=f"host-{number}")
        worker = sim.add_worker()
        await fill(worker, 8)
        chains = [chain_of(BLOCKS, seed=seed) for seed in range(8)]
        for link in worker.store.router.links():  # some read at a segment's second node
            for chain in chains:
                spans = tuple(m.spans_of(chain, [(0, BLOCKS)]))
                await link.call(m.Lookup(spans=spans), deadline_s=1)
        await anyio.sleep(5)
        assert objects.calls["put"] == len(objects.stored) > 0
        for number in range(2):  # the homes of their segments are others now
            sim.kill_node(f"store-{number}")
            del sim.nodes[f"store-{number}"]
        sim.share_view()
        await anyio.sleep(bucket.SETTLE_S + 1)
        found = 0
        for chain in chains:
            there = await pull(worker, chain, range(BLOCKS))
            assert there in (set(), ALL)
            found += len(there)
        assert found >= len(objects.stored) * BLOCKS, "what others have put, too"


async def test_flash_comes_first_and_a_drop_counts_each_block_once() -> None:
    async with cluster() as sim:
        objects, disk = MemoryObjects(), MemoryDisk()
        node = start(sim, objects, disk=disk)
        worker = sim.add_worker()
        await fill(worker)
        counts = node.node.counts()
        assert counts["flash_blocks"] and counts["bucket_blocks"]
        chain = chain_of(BLOCKS, seed=1)
        link = worker.store.router.links()[0]
        reply = await link.call(m.Lookup(spans=tuple(m.spans_of(chain, [(0, 9)]))), deadline_s=1)
        assert reply.on_flash and not reply.in_bucket
        reads = objects.calls["read"]
        assert await pull(worker, chain, range(BLOCKS)) == ALL
        assert objects.calls["read"] == reads
        assert await worker.store.drop(namespace=SPACE) == CHAINS * BLOCKS
        assert not objects.stored
        node = await again(sim, objects, disk=disk)
        assert node.node.counts()["bucket_blocks"] == 0


async def test_a_bucket_is_kept_within_its_bytes_by_what_was_used_least() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        room = 3 * BLOCKS * BLOCK_BYTES
        node = start(sim, objects, total_bytes=room)
        worker = sim.add_worker()
        for seed in range(10):
            chain = chain_of(BLOCKS, seed=seed)
            await push(worker, chain, range(BLOCKS))
            await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
            await anyio.sleep(4)
            if seed > 2:  # used, in memory or not
                assert await pull(worker, chain_of(BLOCKS, seed=2), range(BLOCKS)) == ALL
            assert sum(len(each.data) for each in objects.stored.values()) <= room
        node = await again(sim, objects, total_bytes=room)
        assert node.node.counts()["bucket_objects"] == len(objects.stored) == 2
        assert objects.calls["put"] == 10, "what is hot in memory stays there, too"
        assert await pull(worker, chain_of(BLOCKS, seed=2), range(BLOCKS)) == ALL
        node = await again(sim, objects, total_bytes=room // 2)
        assert node.node.counts()["bucket_objects"] == len(objects.stored) == 1


async def test_a_node_serves_nothing_of_the_bucket_before_it_heard_what_was_erased() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        start(sim, objects, "store-1", host="host-1")
        await fill(sim.add_worker(), 8)
        sim.kill_node("store-0")
        await anyio.sleep(2)
        sim.hang_node("store-1", True)  # the only one who could tell
        node = start(sim, objects)
        keys = [key for seed in range(8) for key in chain_of(BLOCKS, seed=seed).keys]
        await anyio.sleep(1)
        assert tier(node).closed and tier(node).found(keys) == set()
        assert tier(node).bucket.shelf.blocks > 0
        sim.hang_node("store-1", False)
        await anyio.sleep(30)
        assert not tier(node).closed and tier(node).found(keys)


@pytest.mark.parametrize("by", ["tenant", "namespace", "writer", "key"])
async def test_a_drop_erases_in_the_bucket_for_good(by: str) -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker, tenant="a")
        other = chain_of(BLOCKS, seed=77)
        before = set(objects.stored)
        assert before
        key = chain_of(BLOCKS, seed=1).keys[3]
        drop = worker.store.drop
        assert (
            1
            <= await {
                "tenant": partial(drop, tenant="a"),
                "namespace": partial(drop, namespace=SPACE),
                "writer": partial(drop, writer=worker.hello.member_id),
                "key": partial(drop, keys=[key]),
            }[by]()
        )
        assert len(objects.stored) == (len(before) - 1 if by == "key" else 0)
        await again(sim, objects)
        assert await pull(worker, chain_of(BLOCKS, seed=1), range(BLOCKS)) == set()
        await push(worker, other, range(BLOCKS), tenant="a")
        assert await pull(worker, other, range(BLOCKS)) == ALL, "what is put anew is new"


@pytest.mark.parametrize("slow", ["put", "delete"])
async def test_a_drop_leaves_nothing_of_an_upload_that_was_under_way(slow: str) -> None:
    """While it is put, and while it waits for the room that it needs."""
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects, total_bytes=BLOCKS * BLOCK_BYTES + 100)
        worker = sim.add_worker()
        await fill(worker, 3, tenant="a")
        objects.slow[slow] = 1.0
        chain = chain_of(BLOCKS, seed=5)
        await push(worker, chain, range(BLOCKS), tenant="b")
        await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        calls = objects.calls[slow]
        await until(lambda: objects.calls[slow] > calls)
        assert await worker.store.drop(tenant="b") == BLOCKS
        await anyio.sleep(30)
        assert await worker.store.drop(tenant="b") == 0


async def test_a_drop_erases_what_this_node_has_not_seen() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker, tenant="a")
        shelf = tier(sim.nodes["store-0"]).bucket.shelf
        for name in objects.stored:
            shelf.remove(name)
        assert await worker.store.drop(tenant="a") == CHAINS * BLOCKS
        assert not objects.stored


async def test_a_bar_erases_what_was_computed_upon_his_blocks_in_the_bucket_too() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        bad, good = sim.add_worker("bad"), sim.add_worker("good")
        chain = chain_of(BLOCKS, seed=0)
        await push(bad, chain, range(4))
        await good.store.lookup(chain, [(0, 4)], deadline_s=1)
        await push(good, chain, range(4, BLOCKS))
        await good.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await fill(good, 4)
        node = await again(sim, objects)
        before = len(objects.stored)
        assert await good.store.lookup(chain, [(0, BLOCKS)], deadline_s=1) == [(0, BLOCKS)]
        await good.store.router.links()[0].call(m.Bar(writer="bad"), deadline_s=5)
        assert len(objects.stored) == before - 2
        assert await pull(good, chain, range(BLOCKS)) == set()
        assert node.node.counts()["bucket_blocks"] > 0
