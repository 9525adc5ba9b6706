"""What a node does and finds by itself, as its counts and metrics show it: scrub, wear, moves."""

from __future__ import annotations

import anyio
import pytest
import trio.testing
from prometheus_client import CollectorRegistry

from kvass.common.block import BlockLayout
from kvass.common.keys import ranges_of
from kvass.common.transport.route import Setting
from kvass.kvstore.node.observe import Observer
from kvass.launch.store_status import NodeView, findings, word_of
from store_sim import LAYOUT, SimNode, Worker, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
BLOCKS = 40
SLAB = 64
SCRUB_S = 640.0  # ten seconds a block


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def flip(node: SimNode, key: bytes) -> None:
    """Flip one bit of a block where it lies."""
    entry = node.index.ledger.visible(key)
    assert entry is not None
    node.slab.view[entry.slot.offset + entry.header.length // 2] ^= 4


async def test_the_scrub_finds_a_flipped_bit_at_its_pace_and_drops_the_block() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=SLAB, scrub_s=SCRUB_S)
        worker = sim.add_worker()
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        await anyio.sleep(60.5)  # an empty node looks again after a minute
        flip(node, chain.keys[7])
        await anyio.sleep(SCRUB_S / SLAB * 7 - 5)
        counts = node.node.counts()
        assert (counts["scrubbed_blocks"], counts["scrub_found"]) == (7, 0)
        assert counts["visible_blocks"] == BLOCKS
        await anyio.sleep(SCRUB_S / SLAB)
        counts = node.node.counts()
        assert (counts["scrubbed_blocks"], counts["scrub_found"], counts["corrupt"]) == (8, 1, 1)
        assert counts["visible_blocks"] == BLOCKS - 1
        assert worker.store.counts["pull_corrupt"] == 0, "nobody read it meanwhile"
        there = await pull(worker, chain, range(BLOCKS))
        assert there == set(range(BLOCKS)) - {7}
        await push(worker, chain, [7])
        await anyio.sleep(SCRUB_S)  # a pass takes as long as what is there is of the slab
        counts = node.node.counts()
        assert counts["scrub_passes"] == 1 and counts["scrub_found"] == 1
        assert counts["scrubbed_bytes"] == counts["scrubbed_blocks"] * LAYOUT.block_size
        node.index.ledger.check()


async def test_the_scrub_holds_up_neither_eviction_nor_erasure() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=SLAB, scrub_s=1.0)
        worker = sim.add_worker()
        for seed in range(8):
            chain = chain_of(BLOCKS, seed=seed)
            assert await push(worker, chain, range(BLOCKS)) == ((0, BLOCKS),)
            await anyio.sleep(0.3)
            if seed % 2:
                await worker.store.drop(keys=chain.keys[:20])
            node.index.ledger.check()
        assert node.node.counts()["scrubbed_blocks"] > SLAB
        assert node.node.counts()["scrub_found"] == 0


async def test_no_scrub_when_it_is_off() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        await push(worker, chain_of(BLOCKS), range(BLOCKS))
        await anyio.sleep(1_000)
        assert node.node.counts()["scrubbed_blocks"] == 0


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float:
    value = registry.get_sample_value(name, labels)
    assert value is not None, name
    return value


async def _spoil(node: SimNode, worker: Worker) -> None:
    """Fill a node beyond its room, look for what is and is not there, and flip a bit."""
    first, second = chain_of(BLOCKS), chain_of(BLOCKS, seed=1)
    await push(worker, first, range(BLOCKS))
    await push(worker, second, range(BLOCKS))
    await worker.store.lookup(second, [(0, BLOCKS)], deadline_s=1)
    flip(node, second.keys[3])
    there = await pull(worker, second, range(BLOCKS))
    assert ranges_of(sorted(there)) == [(0, 3), (4, BLOCKS)]
    await anyio.sleep(2.0)


@pytest.mark.parametrize("way", ["auto", "tcp"])
async def test_metrics_say_what_the_counts_say(way: Setting) -> None:
    registry = CollectorRegistry()
    observer = Observer(registry)
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=SLAB, setting=way, scrub_s=SCRUB_S)
        node.node.watch(observer.moved)
        worker = sim.add_worker(setting=way)
        observer.update(node.node.counts())
        await _spoil(node, worker)
        for _ in range(2):  # a total that has not grown adds nothing
            observer.update(node.node.counts())
        counts = node.node.counts()
    size, block = SLAB * LAYOUT.block_size, LAYOUT.block_size
    evicted = 2 * BLOCKS - SLAB
    assert sample(registry, "kvass_store_evictions_total", cause="room") == evicted
    assert sample(registry, "kvass_store_evictions_total", cause="quota") == 0
    assert sample(registry, "kvass_store_hits_total", tier="dram") == counts["hits"] > 0
    used = sample(registry, "kvass_store_tier_bytes", tier="dram", what="used")
    assert used == size - counts["free_bytes"] == (SLAB - 1) * block
    assert sample(registry, "kvass_store_tier_bytes", tier="dram", what="total") == size
    assert sample(registry, "kvass_store_tier_blocks", tier="dram") == SLAB - 1
    assert sample(registry, "kvass_store_blocks_total", event="corrupt") == 1
    assert sample(registry, "kvass_store_moved_bytes_total", what="put") == 2 * BLOCKS * block
    assert sample(registry, "kvass_store_moved_bytes_total", what="get") == BLOCKS * block
    assert sample(registry, "kvass_store_moved_seconds_count", what="get") >= 1
    assert sample(registry, "kvass_store_copies", state="waiting") == 0
    assert sample(registry, "kvass_store_scrubbed_bytes_total") == counts["scrubbed_bytes"]
    assert registry.get_sample_value("kvass_store_tier_blocks", {"tier": "flash"}) is None


async def test_a_slab_that_holds_no_block_says_so() -> None:
    large = BlockLayout(layers=8, kv_heads=4, head_dim=16, block_tokens=4, kv_dtype="fp8")
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=3)
        assert 3 * LAYOUT.block_size < large.block_size
        counts = node.node.counts()
        assert counts["too_large_bytes"] == counts["too_large_room_bytes"] == 0
        worker = sim.add_worker(layout=large)
        chain = chain_of(4, layout=large)
        for slot in range(4):
            worker.memory.fill(slot, chain.keys[slot])
        put = await worker.store.push(
            chain, range(4), range(4), hold_owner=None, tenant="", deadline_s=5
        )
        assert put.refused == dict.fromkeys(range(4), "full")
        counts = node.node.counts()
        view = NodeView("store-0", "ready", counts, counts, 2.0)
        found = [text for text in findings(view) if "holds no block of" in text]
        assert len(found) == 1 and "raise store.slab_bytes" in found[0]
        assert word_of(view) == "unwell"
