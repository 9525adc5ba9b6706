"""A bucket that fails, hangs or lies costs misses: never wrong bytes, nor a node's time."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import trio.testing

from kvass.common.errors import Unavailable
from kvass.kvstore.node.tiers import bucket, bucket_tier
from kvass.kvstore.node.tiers.rises import GET_S
from objects_sim import ALL, BLOCKS, CHAINS, MemoryObjects, again, fill, start, tier, until
from store_sim import at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_a_drop_that_the_bucket_refuses_is_said_hidden_and_done_later() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node = start(sim, objects)
        worker = sim.add_worker()
        await fill(worker, tenant="a")
        objects.is_down(True)
        with pytest.raises(Unavailable, match=r"connection refused; the node tries again"):
            await worker.store.drop(tenant="a")
        assert objects.stored and node.node.counts()["bucket_unerased"] == 1
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()
        objects.refuses = lambda what, name: "denied" if what == "delete" else None
        await anyio.sleep(bucket.LIST_S + 60)  # it was listed again meanwhile
        await tier(node).bucket.take_stock()
        assert objects.stored and node.node.counts()["bucket_blocks"] == 0
        objects.is_down(False)
        await until(lambda: not objects.stored)
        assert node.node.counts()["bucket_unerased"] == 0


def flipped(data: bytes) -> bytes:
    return data[:700] + bytes([data[700] ^ 1]) + data[701:]


@pytest.mark.parametrize(
    "how", [flipped, lambda data: data[:-1], lambda data: b"", lambda data: bytes(len(data))]
)
async def test_what_was_changed_there_is_a_miss_and_is_deleted(
    how: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        node = await again(sim, objects, blocks=64)
        objects.change(how)
        for seed in range(CHAINS):
            assert len(await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS))) < BLOCKS
        await until(lambda: not objects.stored)
        counts = await at_rest(sim)
        assert counts["bucket_corrupt"] and counts["bucket_blocks"] == 0
        assert node.index.counts()["corrupt"] == 0
        said = [each for each in caplog.messages if each.startswith("bucket: block")]
        assert len(said) == 1, "not a line for each"


async def test_swapped_objects_are_misses() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        await again(sim, objects, blocks=64)
        kept = list(objects.stored.values())
        objects.stored = dict(zip(objects.stored, [*kept[1:], kept[0]], strict=True))
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()


async def test_an_object_that_somebody_deleted_is_one_miss() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        node = await again(sim, objects, blocks=64)
        objects.stored.clear()
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()
        counts = node.node.counts()
        assert counts["bucket_vanished"] == CHAINS and counts["bucket_blocks"] == 0
        assert counts["bucket_off"] == 0


async def test_a_slow_bucket_is_a_miss_in_bounded_time_and_a_hit_later() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        await again(sim, objects, blocks=64)
        objects.waits_s = 3.0
        chain = chain_of(BLOCKS, seed=1)
        begun_s = anyio.current_time()
        assert await pull(worker, chain, range(BLOCKS)) == set()
        assert anyio.current_time() - begun_s < GET_S + 0.1
        await anyio.sleep(3)
        assert await pull(worker, chain, range(BLOCKS)) == ALL


async def test_a_bucket_that_is_down_is_stepped_aside_from_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        node = await again(sim, objects, blocks=64)
        caplog.clear()
        objects.is_down(True)
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()
        assert node.node.counts()["bucket_off"] == 1
        chain = chain_of(BLOCKS, seed=1)
        assert await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1) == []
        await push(worker, chain_of(BLOCKS, seed=9), range(BLOCKS))
        assert await pull(worker, chain_of(BLOCKS, seed=9), range(BLOCKS)) == ALL
        await anyio.sleep(600)
        assert 5 <= node.node.counts()["bucket_list_faults"] <= 20, "asked ever less often"
        assert sum("goes on without the bucket" in r.message for r in caplog.records) == 1
        objects.is_down(False)
        await until(lambda: node.node.counts()["bucket_off"] == 0)
        assert await pull(worker, chain, range(BLOCKS)) == ALL


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_bucket_that_is_down_when_it_is_written_to_is_no_full_one(hangs: bool) -> None:
    """Nobody reads meanwhile: what is said is that nothing can be read either."""
    async with cluster() as sim:
        objects = MemoryObjects()
        node = start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        if hangs:
            objects.refuses = lambda what, name: "no answer" if what == "put" else None
            objects.slow["list"] = 20.0
        else:
            objects.is_down(True)
        chain = chain_of(BLOCKS, seed=11)
        await push(worker, chain, range(BLOCKS))
        await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await until(lambda: node.node.counts()["bucket_off"] == 1, within_s=10)
        assert node.node.counts()["bucket_full"] == 0
        objects.is_down(False)
        objects.slow.clear()
        await until(lambda: node.node.counts()["bucket_off"] == 0, within_s=60)
        assert await pull(worker, chain_of(BLOCKS, seed=1), range(BLOCKS)) == ALL


async def test_a_bucket_that_takes_nothing_is_still_read() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker)
        stored = set(objects.stored)
        node = await again(sim, objects)
        objects.refuses = lambda what, name: "403 Forbidden" if what == "put" else None
        for seed in (11, 12, 13):
            chain = chain_of(BLOCKS, seed=seed)
            await push(worker, chain, range(BLOCKS))
            await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await anyio.sleep(5)
        counts = node.node.counts()
        assert counts["bucket_full"] == 1 and counts["bucket_off"] == 0
        assert set(objects.stored) == stored and counts["bucket_refused"]
        assert await pull(worker, chain_of(BLOCKS, seed=1), range(BLOCKS)) == ALL
        await at_rest(sim)


async def test_a_bucket_that_hangs_bounds_a_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        start(sim, objects)
        worker = sim.add_worker()
        await fill(worker, tenant="a")
        objects.waits_s = 1e6
        begun_s = anyio.current_time()
        with pytest.raises(Unavailable, match=r"not all was deleted within 8 s"):
            await worker.store.drop(tenant="a")
        assert anyio.current_time() - begun_s < bucket_tier.DROP_S + 0.5
        for seed in range(CHAINS):
            assert await pull(worker, chain_of(BLOCKS, seed=seed), range(BLOCKS)) == set()
