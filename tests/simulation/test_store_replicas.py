"""Copies of blocks on several nodes: made, repaired, handed over, filled by readers, spread."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
import trio.testing

from kvass.common.transport.route import Setting
from kvass.kvstore.node.copies import fills, handover, heat
from kvass.kvstore.placement import Placement, StoreNode
from memory_transport import Attempt, Fault
from store_sim import LAYOUT, Cluster, at_rest, chain_of, cluster, pull, push

pytestmark = pytest.mark.anyio
BLOCKS = 96  # three segments
MOST = handover.HOLD_OFF_S + 5.0  # until a repair is over, and to spare


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=["auto", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


def holders(sim: Cluster, key: bytes) -> set[str]:
    """Return the living nodes where a block can be read."""
    return {
        name
        for name, node in sim.nodes.items()
        if node.alive and node.index.ledger.visible(key) is not None
    }


def lose(sim: Cluster, member_id: str) -> None:
    """Kill a node, and let all know that it has gone."""
    sim.kill_node(member_id)
    del sim.nodes[member_id]
    sim.share_view()


async def test_a_block_with_two_copies_survives_one_crash(way: Setting) -> None:
    async with cluster(replicas=2) as sim:
        for i in range(4):
            sim.add_node(f"store-{i}", blocks=128, host=f"host-{i % 2}", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(BLOCKS)
        assert await push(worker, chain, range(BLOCKS)) == ((0, BLOCKS),)
        await anyio.sleep(1)
        for key in chain.keys:
            hosts = [sim.nodes[name].identity.host_id for name in holders(sim, key)]
            assert sorted(hosts) == ["host-0", "host-1"]
        first = Placement(sim.view()).order(chain.keys[0])[0].member_id
        sim.kill_node(first)
        assert await pull(worker, chain, range(BLOCKS)) == set(range(BLOCKS))
        for name in sim.nodes.keys() - {first}:
            await at_rest(sim, name)


async def test_what_a_crash_took_is_copied_again_after_a_while() -> None:
    async with cluster(replicas=2) as sim:
        for i in range(4):
            sim.add_node(f"store-{i}", blocks=128, host=f"host-{i}")
        worker = sim.add_worker()
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        await anyio.sleep(1)
        for _ in range(2):
            lose(sim, Placement(sim.view()).order(chain.keys[0])[0].member_id)
            await anyio.sleep(handover.HOLD_OFF_S / 2)
            assert len(holders(sim, chain.keys[0])) == 1, "a restart takes less than the hold-off"
            await anyio.sleep(MOST)
            assert [len(holders(sim, key)) for key in chain.keys] == [2] * BLOCKS
        lose(sim, Placement(sim.view()).order(chain.keys[0])[0].member_id)
        assert await pull(worker, chain, range(BLOCKS)) == set(range(BLOCKS))


async def test_a_node_that_drains_hands_over_what_it_alone_holds(way: Setting) -> None:
    async with cluster() as sim:
        for i in range(3):
            sim.add_node(f"store-{i}", blocks=128, setting=way)
        worker = sim.add_worker(setting=way)
        chain, other = chain_of(BLOCKS), chain_of(BLOCKS, seed=1)
        await push(worker, chain, range(BLOCKS))
        leaving = Placement(sim.view()).order(chain.keys[0])[0].member_id
        await worker.store.drain(leaving, deadline_s=1)
        sim.share_view()
        assert await push(worker, other, range(BLOCKS)) == ((0, BLOCKS),), "the others take puts"
        with anyio.fail_after(5):
            assert await sim.nodes[leaving].node.leaving.over() == 0
        assert not sim.nodes[leaving].index.ledger.visible(other.keys[0])
        lose(sim, leaving)
        assert await worker.store.lookup(chain, [(0, BLOCKS)], deadline_s=1) == [(0, BLOCKS)]
        assert await pull(worker, chain, range(BLOCKS)) == set(range(BLOCKS))


async def test_a_put_that_was_begun_before_a_drain_is_handed_over_too(way: Setting) -> None:
    """It became visible after the node had listed what it had to hand over, and left with it."""
    async with cluster() as sim:
        for i in range(3):
            sim.add_node(f"store-{i}", setting=way)
        worker = sim.add_worker(setting=way)
        chain = chain_of(8)
        leaving = Placement(sim.view()).order(chain.keys[0])[0].member_id
        sim.fabric.fault = lambda attempt: Fault(delay_s=1.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push, worker, chain, range(8))
            await anyio.sleep(0.5)
            sim.nodes[leaving].node.drain()
            sim.share_view()
        assert sim.nodes[leaving].node.counts()["visible_blocks"] == 8
        assert await sim.nodes[leaving].node.leaving.over() == 0
        lose(sim, leaving)
        assert await pull(worker, chain, range(8)) == set(range(8))


async def test_a_drain_without_a_taker_ends_and_says_so() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        chain = chain_of(8)
        await push(worker, chain, range(8))
        await worker.store.drain("store-0", deadline_s=1)
        with anyio.fail_after(1):
            assert await node.node.leaving.over() == 8, "nobody is there to take anything"
    async with cluster() as sim:
        node, other = sim.add_node("store-0"), sim.add_node("store-1", blocks=4)
        worker = sim.add_worker()
        chains = [chain_of(8, seed=seed) for seed in range(4)]
        for each in chains:
            await push(worker, each, range(8))
        had = node.index.counts()["visible_blocks"]
        assert had >= 8
        other.index.draining = True  # it takes nothing, and nobody has heard of that
        await worker.store.drain("store-0", deadline_s=1)
        with anyio.fail_after(handover.DRAIN_IDLE_S + 2):
            assert await node.node.leaving.over() == had
        assert (await at_rest(sim))["handover_left"] == had


def tally(counts: dict[str, int]) -> dict[str, int]:
    return {name: counts[f"handover_{name}"] for name in ("elsewhere", "handed", "refused", "left")}


async def test_a_drain_evicts_nothing_where_it_hands_over_and_says_what_found_no_room() -> None:
    async with cluster() as sim:
        node, other = sim.add_node("store-0", blocks=48), sim.add_node("store-1", blocks=32)
        worker = sim.add_worker()
        chains = [chain_of(8, seed=seed) for seed in range(12)]
        for each in chains:
            await push(worker, each, range(8))
        own = {k for each in chains for k in each.keys if other.index.ledger.visible(k)}
        sole = [k for each in chains for k in each.keys if node.index.ledger.visible(k)]
        room = other.index.counts()["free_bytes"] // LAYOUT.block_size
        assert len(sole) > room > 0 and not own & set(sole)
        await worker.store.drain("store-0", deadline_s=1)
        with anyio.fail_after(2):
            assert await node.node.leaving.over() == len(sole) - room, (
                "and nobody waits for the rest"
            )
        assert all(other.index.ledger.visible(key) for key in own)
        assert other.index.counts()["evictions"] == 0
        counts = await at_rest(sim)
        lost = len(sole) - room
        assert tally(counts) == {"elsewhere": 0, "handed": room, "refused": lost, "left": lost}
        assert (counts["drain_held"], counts["drained"]) == (1, 0)
        # It still answers, and once there is room it goes on by itself.
        assert {k for each in chains for k in each.keys if node.index.ledger.visible(k)} >= set(
            sole
        )
        sim.add_node("store-2", blocks=128)
        with anyio.fail_after(20):
            await node.node.leaving.after("held")
            assert await node.node.leaving.over() == 0
        counts = await at_rest(sim)
        assert counts["drained"] == 1 and counts["handover_left"] == 0
        assert all(len(holders(sim, key)) > 1 for key in sole)


async def test_a_drain_that_is_held_up_is_forced_or_cancelled() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker = sim.add_worker()
        await push(worker, chain_of(8), range(8))
        await worker.store.drain("store-0")
        assert await node.node.leaving.over() == 8
        await worker.store.drain("store-0", "cancel")
        assert node.node.leaving.phase == "serving"
        assert (await at_rest(sim))["handover_left"] == 0
        sim.share_view()
        other = chain_of(8, seed=1)
        assert await push(worker, other, range(8)) == ((0, 8),), "it takes blocks again"
        await worker.store.drain("store-0", "force")
        with anyio.fail_after(1):
            assert await node.node.leaving.after("draining") == "drained"
        assert await node.node.leaving.over() == 16
        await worker.store.drain("store-0", "cancel")
        assert node.node.leaving.phase == "serving"


async def test_what_others_evicted_since_they_took_it_is_not_called_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as sim:
        node, other = sim.add_node("store-0"), sim.add_node("store-1", blocks=8)
        sim.view = lambda **_: []  # type: ignore[method-assign]
        worker = sim.add_worker()
        nodes = [StoreNode(name, name, 1) for name in ("store-0", "store-1")]
        worker.store.set_nodes(nodes[:1])
        await push(worker, chain_of(8), range(8))
        for each in (node, other):
            each.node.set_nodes(nodes)
        worker.store.set_nodes(nodes[1:])
        hand_over = handover.Handover._hand_over
        rounds: list[handover.Tally] = []

        async def crowded(self: handover.Handover, keys: object, idle_s: float) -> handover.Tally:
            rounds.append(await hand_over(self, keys, idle_s))  # type: ignore[arg-type]
            if len(rounds) == 1:  # writers use what the drain has filled
                await push(worker, chain_of(8, seed=1), range(8))
            return rounds[-1]

        monkeypatch.setattr(handover.Handover, "_hand_over", crowded)
        node.node.drain()
        assert await node.node.leaving.over() == 8
        assert rounds[0] == handover.Tally(handed=8)
        counts = node.node.counts()
        assert tally(counts) == {"elsewhere": 0, "handed": 0, "refused": 8, "left": 8}


async def test_a_corrupt_copy_is_never_visible() -> None:
    async with cluster(replicas=2) as sim:
        for i in range(2):
            sim.add_node(f"store-{i}")
        worker = sim.add_worker()
        chain = chain_of(8)
        first, second = (node.member_id for node in Placement(sim.view()).order(chain.keys[0]))

        taker = sim.nodes[second].identity.start_id

        def fault(attempt: Attempt) -> Fault:
            return Fault("corrupt" if attempt.target == taker else "whole")

        sim.fabric.fault = fault
        await push(worker, chain, range(8))
        await anyio.sleep(1)
        copied = {i for i, key in enumerate(chain.keys) if second in holders(sim, key)}
        assert len(copied) == 7, "one bit was wrong"
        assert (await at_rest(sim, second))["fill_failed"] == 1
        assert (await at_rest(sim, first))["get_suspect"] == 1, "the source looked at its own"
        sim.kill_node(first)
        assert await pull(worker, chain, range(8)) == copied


async def test_a_new_node_fills_by_reads_and_only_with_what_is_read() -> None:
    async with cluster() as sim:
        sim.add_node("store-0", blocks=512)
        worker = sim.add_worker(slots=400)
        chains = [chain_of(32, seed=seed) for seed in range(12)]
        for chain in chains:
            await push(worker, chain, range(32))
        sim.add_node("store-1", blocks=512)
        await anyio.sleep(MOST)
        assert sim.nodes["store-1"].index.counts()["visible_blocks"] == 0
        moved = [
            c for c in chains if Placement(sim.view()).order(c.keys[0])[0].member_id == "store-1"
        ]
        assert 2 <= len(moved) < len(chains)
        for chain in moved[1:]:
            assert await pull(worker, chain, range(32)) == set(range(32))
        await anyio.sleep(1)
        assert sim.nodes["store-1"].index.counts()["visible_blocks"] == 32 * (len(moved) - 1)
        lose(sim, "store-0")
        assert await pull(worker, moved[-1], range(32)) == set(range(32))
        assert await pull(worker, moved[0], range(32)) == set()


async def test_fills_are_a_bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fills, "QUEUED_MAX", 40)
    async with cluster(replicas=2) as sim:
        for i in range(2):
            sim.add_node(f"store-{i}", blocks=256)
        worker = sim.add_worker()
        sim.hang_node("store-1", True)
        worker.store.set_nodes(sim.view()[:1])
        chain = chain_of(BLOCKS)
        await push(worker, chain, range(BLOCKS))
        await anyio.sleep(2)
        sim.hang_node("store-1", False)
        await anyio.sleep(20)
        counts = await at_rest(sim, "store-1")
        assert counts["fill_queued_blocks"] == 0
        assert counts["fill_dropped"] + counts["filled"] <= BLOCKS
        told = await at_rest(sim, "store-0")
        assert told["copies_told"] + told["copies_untold"] == BLOCKS
        assert counts["filled"] <= 40


async def test_readers_of_a_hot_segment_spread_and_come_back() -> None:
    async with cluster() as sim:
        for i in range(4):
            sim.add_node(f"store-{i}", blocks=512)
        worker = sim.add_worker()
        hot = chain_of(8)
        await push(worker, hot, range(8))
        home = Placement(sim.view()).order(hot.keys[0])[0].member_id
        cold = [chain_of(8, seed=seed) for seed in range(1, 33)]
        for chain in cold:
            await push(worker, chain, range(8))

        def leases() -> Counter[str]:
            return Counter({name: node.index.leases._count for name, node in sim.nodes.items()})

        async def read(times: int) -> Counter[str]:
            """Read the hot chain and a cold one in turn; return where the hot one was read."""
            where: Counter[str] = Counter()
            for number in range(times):
                for chain in (cold[number % len(cold)], hot):
                    before = leases()
                    assert await worker.store.lookup(chain, [(0, 8)], deadline_s=1) == [(0, 8)]
                    assert await pull(worker, chain, range(8)) == set(range(8))
                where += leases() - before
                await anyio.sleep(0.02)
            return where

        await read(200)
        spread = await read(200)
        assert spread.total() == 200 and max(spread.values()) < 60, spread
        assert len(holders(sim, hot.keys[0])) == 4
        assert sim.nodes[home].node.counts()["hot_segments"] == 1
        await anyio.sleep(8 * heat.HALF_LIFE_S)
        assert await read(20) == {home: 20}


def test_homes_are_apart_and_readers_look_at_them_first() -> None:
    nodes = [StoreNode(f"s{i}", f"a:{i}", 1 << 30, host_id=f"h{i // 3}") for i in range(9)]
    for number in range(500):
        segment = number.to_bytes(4, "little").ljust(32, b"s")
        for copies in (1, 2, 3, 4, 9, 12):
            chosen = Placement(nodes).homes(segment, copies)
            assert len(chosen) == len(set(chosen)) == min(copies, 9)
            assert len({node.host_id for node in chosen}) == min(copies, 3)
            assert chosen == Placement(nodes).homes(segment, 12)[: len(chosen)] or copies > 3
            looked = Placement(nodes).looked_at(segment, copies, 1)
            assert looked[: len(chosen)] == chosen
            assert len(set(looked)) == len(looked) == min(copies + 1, 9)
        assert Placement(nodes).homes(segment, 1) == Placement(nodes).order(segment)[:1]
    assert Placement([]).homes(b"s" * 32, 2) == Placement([]).looked_at(b"s" * 32, 1, 1) == []
