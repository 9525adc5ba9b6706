"""Erasures that could not be carried out at once: nothing of what they erase is served later."""

from __future__ import annotations

from functools import partial

import anyio
import pytest
import trio.testing

from kvass.common.errors import Invalid, Unavailable
from kvass.common.keys import Chain
from kvass.kvstore import messages as m
from kvass.kvstore.client import erase
from kvass.kvstore.erasure import new_id
from kvass.kvstore.index.erasures import MARK_S
from kvass.kvstore.node.tiers import bucket
from memory_disk import MemoryDisk
from objects_sim import BLOCKS, CHAINS, MemoryObjects, fill, start, tier, until
from store_sim import Worker, chain_of, cluster, pull, push
from test_store_away import BLOCKS as AWAY_BLOCKS
from test_store_away import Stage, chains_of, stage

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def served(worker: Worker) -> set[int]:
    """Return the seeds of the filled chains of which anything is had."""
    return {n for n in range(CHAINS) if await pull(worker, chain_of(BLOCKS, seed=n), range(BLOCKS))}


async def test_an_upload_that_outlives_a_drop_is_not_found() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node, worker = start(sim, objects), sim.add_worker()
        await fill(worker, 3)
        objects.slow["put"] = 20.0
        chain = chain_of(BLOCKS, seed=7)
        await push(worker, chain, range(BLOCKS), tenant="a")
        await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await until(lambda: bool(tier(node)._uploads._flying))
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="a")
        await anyio.sleep(60)
        assert not await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        assert await pull(worker, chain, range(BLOCKS)) == set()


async def test_a_drop_that_comes_while_another_is_carried_out_reaches_the_bucket_too() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node, worker = start(sim, objects), sim.add_worker()
        alice, bob = (chain_of(BLOCKS, seed=7, salt=salt) for salt in (b"a", b"b"))
        for chain, tenant in ((alice, "alice"), (bob, "bob")):
            await push(worker, chain, range(BLOCKS), tenant=tenant)
            await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await until(lambda: tier(node).found(alice.keys + bob.keys) == {*alice.keys, *bob.keys})
        objects.slow["delete"] = 1.0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(worker.store.drop, tenant="alice", deadline_s=60))
            await until(lambda: objects.calls["delete"] > 0)
            await worker.store.drop(tenant="bob", deadline_s=60)
        assert tier(node).found(alice.keys + bob.keys) == set()
        assert objects.stored == {}


async def test_a_broken_disk_that_owes_an_erasure_leaves_the_bucket_to_be_read() -> None:
    async with cluster() as sim:
        objects, disk = MemoryObjects(), MemoryDisk()
        node, worker = start(sim, objects, disk=disk), sim.add_worker()
        await fill(worker)
        disk.refuses = lambda what, name: "Input/output error"
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="bob")
        for _ in range(2):
            await anyio.sleep(MARK_S + 10)
            before = node.node.counts()["bucket_risen"]
            assert await served(worker) == set(range(CHAINS))
            assert node.node.counts()["bucket_risen"] > before


async def test_what_goes_up_while_its_writer_is_barred_is_not_found() -> None:
    """It is another writer's, and was computed upon the barred one's blocks."""
    async with cluster() as sim:
        objects = MemoryObjects()
        node = start(sim, objects)
        bad, good = sim.add_worker("prefill-0"), sim.add_worker("prefill-1")
        await fill(good, 3)
        chain = chain_of(BLOCKS, seed=7)
        await push(bad, chain, range(6))
        await push(good, chain, range(6, BLOCKS))
        objects.slow["put"] = 1.5
        await good.store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
        await until(lambda: bool(tier(node)._uploads._flying))
        await erase.bar(good.store.router, "prefill-0", 10.0)
        await anyio.sleep(MARK_S + 20)
        assert await pull(good, chain, range(BLOCKS)) == set()


async def test_more_drops_in_an_outage_than_are_kept_erase_everything() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node, worker = start(sim, objects), sim.add_worker()
        await fill(worker, tenant="a")
        objects.is_down(True)
        for tenant in (*(f"t{n}" for n in range(bucket.ORDERS_MAX)), "a"):
            with pytest.raises(Unavailable):
                await worker.store.drop(tenant=tenant)
        objects.is_down(False)
        await until(lambda: node.node.counts()["bucket_off"] == 0)
        await anyio.sleep(60)
        assert await served(worker) == set()


async def test_a_drop_that_the_bucket_refused_lasts_over_a_restart() -> None:
    """With flash, where it is written down."""
    async with cluster() as sim:
        objects, disk = MemoryObjects(), MemoryDisk()
        start(sim, objects, disk=disk)
        worker = sim.add_worker()
        await fill(worker, tenant="a")
        objects.is_down(True)
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="a")
        await anyio.sleep(5)
        sim.kill_node("store-0")
        await anyio.sleep(2)
        objects.is_down(False)
        node = start(sim, objects, disk=disk)
        for wait_s in (1, 2, 40):  # also before it has told the bucket
            await anyio.sleep(wait_s)
            assert await served(worker) == set()
        await until(lambda: not objects.stored)
        assert node.node.counts()["bucket_unerased"] == 0


async def test_a_bucket_that_is_cleared_from_two_sides_goes_on() -> None:
    async with cluster() as sim:
        objects = MemoryObjects()
        node, worker = start(sim, objects), sim.add_worker()
        await fill(worker, tenant="a")
        objects.refuses = lambda what, name: "denied" if what == "delete" else None
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="a")
        objects.refuses = lambda what, name: None
        objects.slow["delete"] = 0.5
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(tier(node).bucket._clear)
        assert node.node.counts()["bucket_unerased"] == 0 and not objects.stored


@pytest.mark.parametrize("kept_max", [2, 1_024])
async def test_what_a_disk_would_not_erase_is_erased_after_a_restart(kept_max: int) -> None:
    """Also by a node that nobody can tell it again, and when more are owed than are kept."""
    async with stage() as on:
        on.start("store-0").node._erasing.heard._kept_max = kept_max
        alice = chains_of("alice")
        await on.fill(alice, "alice")
        await anyio.sleep(20)
        assert on.below("store-0", alice)
        disk = on.disks["store-0"]
        disk.refuses = lambda what, name: None if name.startswith("note") else "Input/output error"
        for tenant in ("alice", "one", "two", "three"):
            with pytest.raises(Unavailable):
                await on.worker.store.drop(tenant=tenant)
        await anyio.sleep(60)
        on.kill("store-0")
        disk.refuses = lambda what, name: None
        await anyio.sleep(2)
        on.start("store-0")
        on.sim.share_view()
        await anyio.sleep(60)
        assert not await had(on, alice)


async def had(on: Stage, chains: list[Chain]) -> int:
    """Return how many blocks are served."""
    count = 0
    for chain in chains:
        count += len(await pull(on.worker, chain, range(AWAY_BLOCKS)))
    return count


async def test_the_id_of_one_erasure_is_no_other_ones() -> None:
    async with stage() as on:
        node = on.start("store-0", flash=False, blocks=64)
        alice = chains_of("alice")
        await on.fill(alice, "alice")
        (link,) = on.worker.store.router.links()
        used = new_id()
        await link.call(m.Drop(tenant="nobody", id=used), deadline_s=5)
        with pytest.raises(Invalid, match="another erasure's"):
            await link.call(m.Drop(tenant="alice", id=used), deadline_s=5)
        await link.call(m.Drop(tenant="nobody", id=used), deadline_s=5)  # asked again
        await link.call(m.Drop(tenant="alice", id=new_id()), deadline_s=5)
        assert not node.index.ledger.entries


async def test_a_large_drop_that_one_of_two_missed_is_told_to_it() -> None:
    """They have met before, so nothing is said of what is kept no more."""
    async with stage() as on:
        nodes = [on.start(name, flash=False, blocks=256) for name in ("store-0", "store-1")]
        alice = chains_of("alice")
        await on.fill(alice, "alice")
        await on.worker.store.drop(tenant="nobody")
        await anyio.sleep(20)
        assert all(node.index.ledger.entries for node in nodes)
        named: list[bytes] = [key for chain in alice for key in chain.keys]
        named += [number.to_bytes(32, "big") for number in range(40_000)]
        link = next(
            link for link in on.worker.store.router.links() if link.node.member_id == "store-0"
        )
        await link.call(m.Drop(keys=tuple(named), id=new_id()), deadline_s=5)
        await anyio.sleep(120)
        assert not any(node.index.ledger.entries for node in nodes)
