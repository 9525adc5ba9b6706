"""Several store nodes: placement, and nodes that die, hang, restart, join and drain."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from kvass.common.errors import Unavailable
from kvass.kvstore import messages as m
from kvass.kvstore.placement import Placement, StoreNode
from kvass.kvstore.results import ClaimResult
from store_sim import LAYOUT, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_segments_spread_over_nodes_and_a_dead_node_is_only_misses() -> None:
    async with cluster() as sim:
        for i in range(3):
            sim.add_node(f"store-{i}", blocks=600)
        worker = sim.add_worker(slots=800)
        chain = chain_of(512)
        home = [Placement(sim.view()).order(chain.segment_key(i))[0].member_id for i in range(512)]
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
        await at_rest(sim)


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
        claim = await worker.store.claim(chain, [(0, 8)], owner="a", deadline_s=1)
        assert claim == ClaimResult(granted=[], visible=[(0, 4)], taken=[])


async def test_a_node_that_drains_sends_writers_and_claimants_on_before_they_know() -> None:
    """It said that others computed the blocks, and that nobody did when it was asked to wait for
    them: a job asked again and again, without a pause, until it heard of the drain."""
    async with cluster() as sim:
        for number in range(2):
            sim.add_node(f"store-{number}")
        worker = sim.add_worker()
        chain = chain_of(8)
        home = Placement(sim.view()).order(chain.keys[0])[0].member_id
        await push(worker, chain, range(4))
        sim.nodes[home].node.drain()
        claim = await worker.store.claim(chain, [(0, 8)], owner="a", deadline_s=1)
        assert claim == ClaimResult(granted=[(4, 8)], visible=[(0, 4)], taken=[])
        assert await push(worker, chain, range(8)) == ((0, 8),)
        assert sim.nodes[home].node.counts()["visible_blocks"] == 4


async def test_an_erasure_that_cannot_be_done_is_not_hidden() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        sim.add_node("store-1")
        worker = sim.add_worker()
        sim.kill_node("store-1")
        with pytest.raises(Unavailable):
            await worker.store.drop(tenant="a")


def test_placement_is_weighted_and_moves_only_what_it_must() -> None:
    nodes = [StoreNode(f"s{i}", f"a:{i}", 1 << (30 + (i == 3))) for i in range(4)]
    segments = [bytes([i % 256, i // 256]).ljust(32, b"s") for i in range(4000)]
    homes = [Placement(nodes).order(s)[0].member_id for s in segments]
    share = homes.count("s3") / len(homes)
    assert share == pytest.approx(0.4, abs=0.03)
    without = [Placement(nodes[:2] + nodes[3:]).order(s)[0].member_id for s in segments]
    for before, after, segment in zip(homes, without, segments, strict=True):
        if before != "s2":
            assert after == before
        else:
            assert after == Placement(nodes).order(segment)[1].member_id
