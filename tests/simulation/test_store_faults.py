"""The store on simulated wires: transfers, writers and readers that fail, lie, hang and die."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from kvass.common.transport.route import Setting
from memory_transport import Attempt, Fault
from store_sim import at_rest, chain_of, cluster, faults, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


async def test_corrupt_transfers_are_never_visible(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(4)
        verb = "read" if way == "auto" else "write"
        for outcome in ("corrupt", "partial", "failed"):
            faults(sim, verb, outcome, times=1)
            first = await push(worker, chain, range(4))
            assert await worker.store.lookup(chain, [(0, 4)], deadline_s=1) == list(first)
            await anyio.sleep(10)
            await at_rest(sim)
            await worker.store.drop(keys=chain.keys)
        faults(sim, verb, "corrupt")
        assert await push(worker, chain, range(4)) != ((0, 4),)
        assert (await at_rest(sim))["put_corrupt"] >= 2
        assert worker.store.counts["push_corrupt"] >= 2


async def test_a_node_that_takes_nothing_new_has_failed_no_put(way: Setting) -> None:
    """It has told so before anything moved: with no other node, the store is unavailable."""
    async with cluster() as sim:
        node = sim.add_node("store-0", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(4)
        await push(worker, chain, range(2))
        node.index.draining = True
        assert await push(worker, chain, range(4)) == ((0, 2),)
        assert worker.store.counts["push_unavailable"] == 2
        assert worker.store.counts["push_failed"] == 0
        await at_rest(sim)


async def test_a_failed_pull_is_a_miss(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(4)
        await push(worker, chain, range(4))
        verb = "read" if way == "auto" else "write"
        for outcome in ("failed", "partial", "corrupt", "lost"):
            faults(sim, verb, outcome)
            there = await pull(worker, chain, range(4))
            # Half a write over what an earlier one left may be the whole block: right is right.
            assert there != {0, 1, 2, 3} or outcome == "partial"
            faults(sim, verb, "whole")
            await anyio.sleep(10)
            assert await pull(worker, chain, range(4)) == {0, 1, 2, 3}
        assert (await at_rest(sim))["corrupt"] == 0


async def test_a_block_that_rots_in_the_slab_is_dropped() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(4)
        await push(worker, chain, range(4))
        entry = node.index.ledger.visible(chain.keys[2])
        assert entry is not None
        node.slab.view[entry.slot.offset + 5] ^= 1
        assert await pull(worker, chain, range(4)) == {0, 1, 3}
        assert (await at_rest(sim))["corrupt"] == 1
        assert await worker.store.lookup(chain, [(0, 4)], deadline_s=1) == [(0, 2), (3, 4)]


async def test_a_slow_reader_notices_that_its_lease_is_over() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=8)
        writer, reader = sim.add_worker("a"), sim.add_worker("b")
        chain, other = chain_of(8), chain_of(8, seed=1)
        await push(writer, chain, range(8))

        def fault(attempt: Attempt) -> Fault:
            slow = attempt.verb == "read" and attempt.target == reader.hello.start_id
            return Fault(delay_s=4.0 if slow else 0.0)

        sim.fabric.fault = fault
        async with anyio.create_task_group() as tasks:

            async def reuse() -> None:
                await anyio.sleep(0.1)
                for wire in reader.wires:  # it hangs, and cannot prolong its lease
                    wire.other.hang(True)
                await anyio.sleep(2.0)
                assert node.index.leases.lost == 1
                assert await push(writer, other, range(8)) == ((0, 8),)
                for wire in reader.wires:
                    wire.other.hang(False)

            tasks.start_soon(reuse)
            assert await pull(reader, chain, range(8)) == set()
        assert (await at_rest(sim))["corrupt"] == 0
        assert reader.store.counts["lease_lost"] == 1
        assert reader.store.counts["pull_corrupt"] == 8
        assert await pull(reader, other, range(8)) == set(range(8))


async def test_dropped_while_it_is_read_stays_whole_for_the_reader() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", blocks=8)
        writer, reader = sim.add_worker("a"), sim.add_worker("b")
        chain, other = chain_of(8), chain_of(8, seed=1)
        await push(writer, chain, range(8))
        target = reader.hello.start_id
        sim.fabric.fault = lambda attempt: Fault(delay_s=0.2 if attempt.target == target else 0.0)
        async with anyio.create_task_group() as tasks:

            async def drop() -> None:
                await anyio.sleep(0.1)
                assert await writer.store.drop(writer="a") == 8
                assert node.node.counts()["retired_blocks"] == 8
                assert await push(writer, other, range(8)) == ()  # full: no slot is reused

            tasks.start_soon(drop)
            assert await pull(reader, chain, range(8)) == set(range(8))
        assert (await at_rest(sim))["free_bytes"] == node.slab.size


async def test_a_writer_that_dies_before_its_commit_blocks_nobody(way: Setting) -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", setting=way)
        dying, other = sim.add_worker("a", setting=way), sim.add_worker("b", setting=way)
        chain = chain_of(4)
        # Its transfer never ends, and it dies in the middle.
        faults(sim, "read" if way == "auto" else "write", "lost", times=1)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(push, dying, chain, range(4))
                await anyio.sleep(0.5)
                assert node.node.counts()["writing_blocks"] == 4
                assert await push(other, chain, range(4)) == ()  # busy
                sim.kill_worker(dying)
                scope.cancel()
        await anyio.sleep(0.1)
        assert await other.store.lookup(chain, [(0, 4)], deadline_s=1) == []
        assert await push(other, chain, range(4)) == ((0, 4),)
        await anyio.sleep(10)
        counts = await at_rest(sim)
        assert counts["visible_blocks"] == 4 and counts["landing_quarantined_bytes"] == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.25])
async def test_cancelled_transfers_leave_nothing(way: Setting, delay_s: float) -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(16)
        sim.fabric.fault = lambda attempt: Fault(delay_s=0.1)
        with anyio.move_on_after(delay_s):
            await push(worker, chain, range(16))
        await anyio.sleep(10)
        await at_rest(sim)
        await push(worker, chain, range(16))
        with anyio.move_on_after(delay_s):
            await pull(worker, chain, range(16))
        before = worker.memory.array.copy()
        await anyio.sleep(10)
        assert (worker.memory.array == before).all(), "bytes came after the pull had ended"
        await at_rest(sim)
        landing = worker.store._router.links()[0].endpoints
        assert landing is not None
        assert landing.landing.counts()["free"] == landing.landing.counts()["total"]
        assert node.node.counts()["landing_quarantined_bytes"] == 0


async def test_what_was_cancelled_can_be_pushed_again_at_once(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(4)
        sim.fabric.fault = lambda attempt: Fault(delay_s=0.3)
        with anyio.move_on_after(0.1):
            await push(worker, chain, range(4))
        sim.fabric.fault = lambda attempt: Fault()
        assert await push(worker, chain, range(4)) == ((0, 4),)
        assert await pull(worker, chain, range(4)) == {0, 1, 2, 3}
        await anyio.sleep(1)
        await at_rest(sim)
