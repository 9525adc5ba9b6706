"""The store's client and nodes on simulated wires: each promise of the protocol, and its faults."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest
import trio.testing

from kvass.common.errors import Unavailable
from kvass.common.transport.memory import Attempt, Fault, Outcome
from kvass.common.transport.route import Setting
from kvass.kvstore import messages as m
from kvass.kvstore.client import WaitResult
from kvass.kvstore.placement import StoreNode, order
from store_sim import LAYOUT, TP_LAYOUT, Cluster, Worker, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
WAYS: list[Setting] = ["auto", "tcp"]
ALL = [(0, 1 << 16)]


@pytest.fixture
def anyio_backend() -> Iterator[tuple[str, dict[str, object]]]:
    yield "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


def faults(sim: Cluster, verb: str, outcome: Outcome, *, times: int = 1 << 30) -> None:
    """Let the next transfers of one verb meet a fault."""
    left = [times]

    def fault(attempt: Attempt) -> Fault:
        if attempt.verb != verb or not left[0]:
            return Fault()
        left[0] -= 1
        return Fault(outcome)

    sim.fabric.fault = fault


def at_rest(sim: Cluster, member_id: str = "store-0") -> dict[str, int]:
    """Return a node's counts, with nothing left over from what went before."""
    counts = sim.nodes[member_id].node.counts()
    for name in ("writing_bytes", "retired_bytes", "quarantined_bytes", "leases", "puts"):
        assert counts[name] == 0, (name, counts)
    assert counts["landing_lent_bytes"] == 0
    return counts


async def test_what_one_worker_pushes_another_pulls(way: Setting) -> None:
    async with cluster() as sim:
        sim.add_node("store-0", setting=way)
        writer, reader = sim.add_worker("a", setting=way), sim.add_worker("b", setting=way)
        chain = chain_of(40)
        assert await push(writer, chain, range(40)) == ((0, 40),)
        assert await reader.store.lookup(chain, [(0, 40)], deadline_s=1) == [(0, 40)]
        assert await pull(reader, chain, range(40)) == set(range(40))
        assert at_rest(sim)["visible_blocks"] == 40
        assert not reader.store.counts["pull_missing"]


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


# --- faults ---


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
            at_rest(sim)
            await worker.store.drop(keys=chain.keys)
        faults(sim, verb, "corrupt")
        assert await push(worker, chain, range(4)) != ((0, 4),)
        assert at_rest(sim)["put_corrupt"] >= 2
        assert worker.store.counts["push_corrupt"] >= 2


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
        assert at_rest(sim)["corrupt"] == 0


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
        assert await worker.store.lookup(chain, [(0, 4)], deadline_s=1) == [(0, 2), (3, 4)]
        assert at_rest(sim)["corrupt"] == 1


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
                await anyio.sleep(2.0)
                assert node.index.leases.lost == 1
                assert await push(writer, other, range(8)) == ((0, 8),)

            tasks.start_soon(reuse)
            assert await pull(reader, chain, range(8)) == set()
        assert reader.store.counts["lease_lost"] == 1
        assert reader.store.counts["pull_corrupt"] == 8
        assert at_rest(sim)["corrupt"] == 0
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
        assert at_rest(sim)["free_bytes"] == node.slab.size


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
        counts = at_rest(sim)
        assert counts["visible_blocks"] == 4 and counts["landing_quarantined_bytes"] == 0


async def test_a_writer_that_hangs_after_begin_is_given_up_at_its_deadline() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker, other = sim.add_worker("a"), sim.add_worker("b")
        chain = chain_of(4)
        await worker.store.lookup(chain, [(0, 4)], deadline_s=1)
        (link,) = worker.store._router.links()
        await link.ways(deadline_s=1)
        begin = m.PutBegin(
            put_id="hanging",
            spans=tuple(m.spans_of(chain, [(0, 4)])),
            namespace=chain.namespace,
            tenant="",
            writer="a",
            token_count=4,
            block_size=LAYOUT.block_size,
            head_groups=1,
            groups=(0, 1),
            deadline_s=3.0,
        )
        assert (await link.call(begin, deadline_s=1)).granted == ((0, 4),)
        assert (await link.call(begin, deadline_s=1)).granted == ((0, 4),)  # asked again
        await anyio.sleep(2.5)
        assert await push(other, chain, range(4)) == ()
        await anyio.sleep(1.0)
        assert await push(other, chain, range(4)) == ((0, 4),)
        commit = m.PutCommit(
            put_id="hanging",
            keys=(chain.keys[0],),
            indices=(0,),
            addresses=(worker.memory.address_of(0),),
            checksums=(1,),
            deadline_s=1.0,
        )
        assert await link.call(commit, deadline_s=1) == m.PutStored(stored=(), corrupt=())
        at_rest(sim)


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
        at_rest(sim)
        await push(worker, chain, range(16))
        with anyio.move_on_after(delay_s):
            await pull(worker, chain, range(16))
        before = worker.memory.array.copy()
        await anyio.sleep(10)
        assert (worker.memory.array == before).all(), "bytes came after the pull had ended"
        at_rest(sim)
        landing = worker.store._router.links()[0].endpoints
        assert landing is not None
        assert landing.landing.counts()["free"] == landing.landing.counts()["total"]
        assert node.node.counts()["landing_quarantined_bytes"] == 0


# --- nodes ---


async def test_segments_spread_over_nodes_and_a_dead_node_is_only_misses() -> None:
    async with cluster() as sim:
        for i in range(3):
            sim.add_node(f"store-{i}", blocks=600)
        worker = sim.add_worker(slots=800)
        chain = chain_of(512)
        home = [order(chain.segment_key(i), sim.view())[0].member_id for i in range(512)]
        assert len(set(home)) == 3
        for first in range(0, 512, 64):
            wanted = range(first, first + 64)
            assert await push(worker, chain, wanted) == ((first, first + 64),)
        assert await worker.store.lookup(chain, [(0, 512)], deadline_s=1) == [(0, 512)]
        sim.kill_node("store-1")
        left = {i for i in range(512) if home[i] != "store-1"}
        found = await worker.store.lookup(chain, [(0, 512)], deadline_s=1)
        assert {i for first, stop in found for i in range(first, stop)} == left
        assert await pull(worker, chain, range(64)) == left & set(range(64))
        # What its death took is put again, at the next node in order.
        assert await push(worker, chain, range(64)) == ((0, 64),)
        assert await pull(worker, chain, range(64)) == set(range(64))
        claim = await worker.store.claim(chain, [(448, 512)], owner="a", deadline_s=1)
        granted = {i for first, stop in claim.granted for i in range(first, stop)}
        assert granted == set(range(448, 512)) - left


async def test_a_node_that_hangs_costs_one_deadline_and_comes_back() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(8)
        await push(worker, chain, range(8))
        sim.hang_node("store-0", True)
        started_s = anyio.current_time()
        assert await worker.store.lookup(chain, [(0, 8)], deadline_s=5) == []
        assert anyio.current_time() - started_s <= 1.01
        for _ in range(10):
            assert await pull(worker, chain, range(8)) == set()
            assert await push(worker, chain, range(8)) == ()
        settled = await worker.store.wait(chain, [(0, 8)], until="settled", deadline_s=5)
        assert settled.unclaimed == [(0, 8)]
        assert anyio.current_time() - started_s <= 1.01
        sim.hang_node("store-0", False)
        await anyio.sleep(10)
        assert await pull(worker, chain, range(8)) == set(range(8))
        at_rest(sim)


async def test_a_node_that_restarts_has_nothing_and_old_names_reach_nothing() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(8)
        await push(worker, chain, range(8))
        (link,) = worker.store._router.links()
        lease = await link.call(
            m.GetBegin(
                spans=tuple(m.spans_of(chain, [(0, 8)])),
                block_size=LAYOUT.block_size,
                head_groups=1,
                groups=(0, 1),
            ),
            deadline_s=1,
        )
        sim.kill_node("store-0")
        sim.add_node("store-0")
        await anyio.sleep(2)
        assert await pull(worker, chain, range(8)) == set()
        assert await push(worker, chain, range(8)) == ((0, 8),)
        (link,) = worker.store._router.links()
        assert not (await link.call(m.GetEnd(lease_id=lease.lease_id), deadline_s=1)).held
        assert await pull(worker, chain, range(8)) == set(range(8))


async def test_blocks_that_moved_with_the_membership_are_found_at_the_next_node() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=512)
        worker = sim.add_worker(slots=300)
        chain = chain_of(128)
        await push(worker, chain, range(128))
        sim.add_node("store-1", blocks=512)
        assert await worker.store.lookup(chain, [(0, 128)], deadline_s=1) == [(0, 128)]
        assert await pull(worker, chain, range(128)) == set(range(128))


async def test_a_drained_node_answers_reads_only() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(8)
        await push(worker, chain, range(4))
        await worker.store.drain("store-0", deadline_s=1)
        assert await push(worker, chain, range(8)) == ((0, 4),)
        assert await pull(worker, chain, range(8)) == {0, 1, 2, 3}
        assert (await worker.store.claim(chain, [(0, 8)], owner="a", deadline_s=1)).taken == [
            (4, 8)
        ]


async def test_an_erasure_that_cannot_be_done_is_not_hidden() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        sim.add_node("store-1")
        worker = sim.add_worker()
        sim.kill_node("store-1")
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="a")


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
        assert at_rest(sim)["held_bytes"] == 0
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
        at_rest(sim)


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


# --- placement ---


def test_placement_is_weighted_and_moves_only_what_it_must() -> None:
    nodes = [StoreNode(f"s{i}", f"a:{i}", 1 << (30 + (i == 3))) for i in range(4)]
    segments = [bytes([i % 256, i // 256]).ljust(32, b"s") for i in range(4000)]
    homes = [order(s, nodes)[0].member_id for s in segments]
    share = homes.count("s3") / len(homes)
    assert share == pytest.approx(0.4, abs=0.03)
    without = [order(s, nodes[:2] + nodes[3:])[0].member_id for s in segments]
    for before, after, segment in zip(homes, without, segments, strict=True):
        if before != "s2":
            assert after == before
        else:
            assert after == order(segment, nodes)[1].member_id
