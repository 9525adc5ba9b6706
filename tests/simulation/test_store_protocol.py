"""The store's client and nodes on simulated wires: what they promise when nothing breaks."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
import trio.testing

from inline import InlineExecutor, T
from kvass.common.block import BlockLayout
from kvass.common.transport.route import Setting
from kvass.kvstore.client import pulls
from kvass.kvstore.results import WaitResult
from store_sim import LAYOUT, TP_LAYOUT, Worker, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


async def test_what_one_worker_pushes_another_pulls(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        writer, reader = sim.add_worker("a", setting=way), sim.add_worker("b", setting=way)
        chain = chain_of(40)
        assert await push(writer, chain, range(40)) == ((0, 40),)
        assert await reader.store.lookup(chain, [(0, 40)], deadline_s=1) == [(0, 40)]
        assert await pull(reader, chain, range(40)) == set(range(40))
        assert (await at_rest(sim))["visible_blocks"] == 40
        assert not reader.store.counts.total(), reader.store.counts


@pytest.mark.parametrize(("copied_at_once", "threads_woken"), [(pulls.COPY_BYTES, 0), (0, 1)])
async def test_few_bytes_over_tcp_wake_no_thread(
    monkeypatch: pytest.MonkeyPatch, copied_at_once: int, threads_woken: int
) -> None:
    monkeypatch.setattr(pulls, "COPY_BYTES", copied_at_once)
    async with cluster() as sim:
        sim.add_node("store-0", setting="tcp")
        worker = sim.add_worker(setting="tcp")
        await push(worker, chain_of(4), range(4))
        woken = []

        class Noted(InlineExecutor):
            async def run(self, function: Callable[[], T]) -> T:
                woken.append(function)
                return await super().run(function)

        transfers = worker.store._transfers
        assert transfers is not None
        transfers.executor = Noted()
        assert await pull(worker, chain_of(4), range(4)) == set(range(4))
        assert len(woken) == threads_woken


async def test_a_reader_over_tcp_that_leaves_is_written_to_no_more() -> None:
    """The node kept an agent for each, with a port, until there were 64."""
    async with cluster() as sim:
        node = sim.add_node("store-0", setting="tcp")
        writer, reader = sim.add_worker("a", setting="tcp"), sim.add_worker("b", setting="tcp")
        await push(writer, chain_of(4), range(4))
        assert await pull(reader, chain_of(4), range(4)) == set(range(4))
        peers = node.node._state.endpoints.writer._peers  # type: ignore[attr-defined]
        assert list(peers._cards) == [reader.hello.start_id]
        sim.kill_worker(reader)
        await anyio.sleep(0.5)
        assert not peers._cards
        await at_rest(sim)


async def test_a_hole_is_only_a_hole() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(40)
        await push(worker, chain, [*range(10), *range(20, 40)])
        assert await worker.store.lookup(chain, [(0, 40)], deadline_s=1) == [(0, 10), (20, 40)]
        assert await pull(worker, chain, range(5, 25)) == {*range(5, 10), *range(20, 25)}
        assert await worker.store.drop(keys=chain.keys[25:30]) == 5
        found = await worker.store.lookup(chain, [(0, 40)], deadline_s=1)
        assert found == [(0, 10), (20, 25), (30, 40)]


async def test_chains_that_part_inside_a_segment_are_told_apart() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        one = chain_of(8)
        other = chain_of(4)
        other.extend(range(16))
        assert one.segment_key(7) == other.segment_key(7) and one.keys[7] != other.keys[7]
        await push(worker, one, range(8))
        assert await worker.store.lookup(other, [(0, 8)], deadline_s=1) == [(0, 4)]
        assert await pull(worker, other, range(8)) == {0, 1, 2, 3}


async def test_a_private_chain_is_not_found_by_others() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        await push(worker, chain_of(8, salt=b"a" * 32), range(8), tenant="a")
        for salt in (b"", b"b" * 32):
            assert await worker.store.lookup(chain_of(8, salt=salt), [(0, 8)], deadline_s=1) == []
        assert await worker.store.drop(tenant="b") == 0
        assert await worker.store.drop(tenant="a") == 8


# --- claims and waiting ---


async def test_one_of_many_computes_and_the_others_wait() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        chain = chain_of(4)
        computed: list[str] = []

        async def job(worker: Worker, name: str) -> None:
            while True:
                claim = await worker.store.claim(chain, [(0, 4)], owner=name, deadline_s=1)
                if claim.granted:
                    computed.append(name)
                    await anyio.sleep(1.0)
                    await push(worker, chain, range(4))
                if claim.visible == [(0, 4)]:
                    break
                await worker.store.wait(chain, [(0, 4)], until="settled", deadline_s=10)
            assert await pull(worker, chain, range(4)) == {0, 1, 2, 3}

        async with anyio.create_task_group() as tasks:
            for i in range(20):
                tasks.start_soon(job, sim.add_worker(f"w{i}"), f"job-{i}")
        assert len(computed) == 1


async def test_a_claim_that_runs_out_goes_to_exactly_one_waiter() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        dead, *waiters = [sim.add_worker(f"w{i}") for i in range(6)]
        chain = chain_of(4)
        assert (await dead.store.claim(chain, [(0, 4)], owner="dead", deadline_s=1)).granted
        started_s = anyio.current_time()
        winners = []

        async def wait(worker: Worker, name: str) -> None:
            result = await worker.store.wait(chain, [(0, 4)], until="settled", deadline_s=10)
            assert result == WaitResult(visible=[], unclaimed=[(0, 4)])
            assert 2.0 <= anyio.current_time() - started_s < 2.5
            claim = await worker.store.claim(chain, [(0, 4)], owner=name, deadline_s=1)
            winners.extend([name] * bool(claim.granted))

        async with anyio.create_task_group() as tasks:
            for i, worker in enumerate(waiters):
                tasks.start_soon(wait, worker, f"w{i}")
        assert len(winners) == 1
        # The dead one was only slow: its late commit is accepted.
        assert await push(dead, chain, range(4)) == ((0, 4),)


async def test_renewed_claims_last_and_released_ones_end_at_once() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        one, two = sim.add_worker("a"), sim.add_worker("b")
        chain = chain_of(4)
        for _ in range(5):
            assert (await one.store.claim(chain, [(0, 4)], owner="a", deadline_s=1)).granted
            await anyio.sleep(1.5)
            assert (await two.store.claim(chain, [(0, 4)], owner="b", deadline_s=1)).taken
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.store.release_claims, "a")
            result = await two.store.wait(chain, [(0, 4)], until="settled", deadline_s=10)
        assert result.unclaimed == [(0, 4)]


async def test_waiting_for_visible_ends_at_the_deadline_with_nothing() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        started_s = anyio.current_time()
        result = await worker.store.wait(chain_of(4), [(0, 4)], until="visible", deadline_s=7)
        assert result == WaitResult([], []) and anyio.current_time() - started_s == pytest.approx(7)


async def test_waiting_over_several_nodes_ends_with_the_first_block() -> None:
    async with cluster() as sim:
        for i in range(3):
            sim.add_node(f"store-{i}", blocks=256)
        one, two = sim.add_worker("a"), sim.add_worker("b")
        chain = chain_of(200)

        async def push_later() -> None:
            await anyio.sleep(3)
            await push(one, chain, [150])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push_later)
            result = await two.store.wait(chain, [(0, 200)], until="visible", deadline_s=60)
        assert result.visible == [(150, 151)]


# --- holds, pins, space ---


async def test_held_blocks_outlive_pressure_and_full_is_an_answer() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=16)
        worker = sim.add_worker()
        held = chain_of(8)
        assert await push(worker, held, range(8), hold_owner="job") == ((0, 8),)
        for seed in range(1, 6):
            assert await push(worker, chain_of(8, seed=seed), range(8)) == ((0, 8),)
        # Half of the slab may be held, and is.
        assert await push(worker, chain_of(8, seed=9), range(8), hold_owner="job-2") == ()
        assert await pull(worker, held, range(8)) == set(range(8))
        assert (await worker.store.stats())[0]["held_bytes"] == 8 * LAYOUT.block_size
        await worker.store.release_hold("job")
        for seed in range(1, 6):
            await push(worker, chain_of(8, seed=seed), range(8), hold_owner=None)
        assert await worker.store.lookup(held, [(0, 8)], deadline_s=1) == []


async def test_holds_of_the_dead_run_out() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=16, hold_s=20.0)
        worker = sim.add_worker()
        await push(worker, chain_of(8), range(8), hold_owner="job")
        await anyio.sleep(21)
        assert (await at_rest(sim))["held_bytes"] == 0
        assert await push(worker, chain_of(16, seed=1), range(16)) == ((0, 16),)


async def test_pins_have_an_owner_a_deadline_and_a_quota() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=64)
        worker = sim.add_worker()
        chain = chain_of(16)
        await push(worker, chain, range(16))
        pin = worker.store.pin
        pinned = await pin(chain, [(0, 16)], owner="o", duration_s=30, deadline_s=1)
        assert pinned == [(0, 8)]  # a quarter of the half that may be protected
        for seed in range(1, 9):
            await push(worker, chain_of(16, seed=seed), range(16))
        assert await worker.store.lookup(chain, [(0, 16)], deadline_s=1) == [(0, 8)]
        await anyio.sleep(31)
        for seed in range(11, 19):
            await push(worker, chain_of(16, seed=seed), range(16))
        assert await worker.store.lookup(chain, [(0, 16)], deadline_s=1) == []


async def test_more_checksums_than_fit_a_call_go_in_batches(way: Setting) -> None:
    layout = BlockLayout(
        layers=1, kv_heads=128, head_dim=16, block_tokens=1, kv_dtype="fp8", head_groups=128
    )
    async with cluster() as sim:
        sim.add_node("store-0", layout=layout, setting=way, blocks=600, landing_bytes=64 << 20)
        worker = sim.add_worker(layout=layout, setting=way, slots=1100, landing_bytes=64 << 20)
        chain = chain_of(600, layout=layout)
        assert await push(worker, chain, range(600)) == ((0, 600),)
        there = await worker.store.pull(chain, range(600), range(500, 1100), deadline_s=5.0)
        assert there == set(range(600))
        assert not +worker.store.counts


async def test_more_than_the_landing_memory_holds_goes_in_batches() -> None:
    async with cluster() as sim:
        landing = 6 * LAYOUT.block_size
        sim.add_node("store-0", blocks=128, setting="tcp", landing_bytes=landing)
        workers = [sim.add_worker(f"w{i}", setting="tcp", landing_bytes=landing) for i in range(4)]
        async with anyio.create_task_group() as tasks:
            for i, worker in enumerate(workers):
                tasks.start_soon(push, worker, chain_of(24, seed=i), range(24))
        async with anyio.create_task_group() as tasks:

            async def check(i: int, worker: Worker) -> None:
                assert await pull(worker, chain_of(24, seed=i), range(24)) == set(range(24))

            for i, worker in enumerate(workers):
                tasks.start_soon(check, i, worker)
        await at_rest(sim)


# --- tensor parallelism ---


async def test_written_at_tp_4_and_read_at_tp_2_and_1(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", layout=TP_LAYOUT, setting=way)
        chain = chain_of(12, layout=TP_LAYOUT)
        ranks = [
            sim.add_worker(
                f"rank-{r}", layout=TP_LAYOUT, groups=TP_LAYOUT.rank_groups(r, 4), setting=way
            )
            for r in range(4)
        ]
        for n, rank in enumerate(ranks):
            assert await ranks[0].store.lookup(chain, [(0, 12)], deadline_s=1) == []
            # All but its own group is garbage, as in a real rank's memory.
            for i in range(12):
                rank.memory.fill(i, chain.keys[i])
                for g in set(range(4)) - set(TP_LAYOUT.rank_groups(n, 4)):
                    start = TP_LAYOUT.group_offset(g)
                    rank.memory.array[i, start : start + TP_LAYOUT.group_size] = 0
            result = await rank.store.push(
                chain, range(12), range(12), hold_owner=None, tenant="", deadline_s=5
            )
            assert result.stored == set(range(12))
        assert await ranks[0].store.lookup(chain, [(0, 12)], deadline_s=1) == [(0, 12)]
        for degree in (1, 2):
            for r in range(degree):
                groups = TP_LAYOUT.rank_groups(r, degree)
                worker = sim.add_worker(
                    f"tp{degree}-{r}", layout=TP_LAYOUT, groups=groups, setting=way
                )
                slots = range(50, 62)
                there = await worker.store.pull(chain, range(12), slots, deadline_s=5)
                assert there == set(range(12))
                low = TP_LAYOUT.group_offset(groups.start)
                high = low + len(groups) * TP_LAYOUT.group_size
                for i, slot in enumerate(slots):
                    got = worker.memory.array[slot].copy()
                    worker.memory.fill(slot, chain.keys[i])
                    right = worker.memory.array[slot]
                    assert (got[low:high] == right[low:high]).all()
                    assert (got[:low] == 0xEE).all() and (got[high:] == 0xEE).all()
