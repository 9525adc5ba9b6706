"""Copies that were lost with a node, of blocks that only flash has at the other one."""

from __future__ import annotations

import anyio
import pytest
import trio.testing

from kvass.kvstore.node.copies.handover import HOLD_OFF_S
from kvass.kvstore.node.copies.repair import IDLE_S
from store_sim import pull
from test_store_away import BLOCKS, NAMES, Stage, chains_of, stage

pytestmark = pytest.mark.anyio
CHAINS = chains_of("bob", 9)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def holders(cluster: Stage, key: bytes) -> set[str]:
    nodes = [node for node in cluster.sim.nodes.values() if node.alive]
    below = {node.member_id for node in nodes if key in on_flash(cluster, node.member_id)}
    return below | {node.member_id for node in nodes if node.index.ledger.visible(key)}


def on_flash(cluster: Stage, name: str) -> set[bytes]:
    return cluster.below(name, CHAINS)


async def filled(cluster: Stage) -> set[bytes]:
    """Put more than memory holds; return what only flash has at some node."""
    for name in NAMES:
        cluster.start(name, blocks=24)
    for chain in CHAINS:
        await cluster.fill([chain], "bob")
        for node in cluster.sim.nodes.values():  # copies, too, are worth a place on flash
            node.node._state.on_asked(list(node.index.ledger.entries))
        await anyio.sleep(0.3)
    every = {key for chain in CHAINS for key in chain.keys}
    assert all(len(holders(cluster, key)) == 2 for key in every)
    nodes = cluster.sim.nodes.values()
    return {
        key for n in nodes for key in on_flash(cluster, n.member_id) - n.index.ledger.entries.keys()
    }


async def test_what_only_flash_has_is_copied_when_its_other_copy_is_lost() -> None:
    async with stage(replicas=2) as cluster:
        below = await filled(cluster)
        cluster.kill("store-1")
        alone = {key for key in below if len(holders(cluster, key)) == 1}
        assert len(alone) > 10
        await anyio.sleep(HOLD_OFF_S / 2)
        told = [node.node.counts().get("repair_told") for node in cluster.sim.nodes.values()]
        assert told == [0, 0, 0], "a restart takes less"
        await anyio.sleep(HOLD_OFF_S + 4 * IDLE_S)
        assert all(holders(cluster, key) == {"store-0", "store-2"} for key in alone)
        # Where it was copied to it is on flash, too: memory is full of other things.
        cold = [key for key in alone if len({n for n in NAMES if key in on_flash(cluster, n)}) < 2]
        assert not cold
        for chain in CHAINS:
            assert await pull(cluster.worker, chain, range(BLOCKS)) == set(range(BLOCKS))
        counts = [n.node.counts() for n in cluster.sim.nodes.values() if n.alive]
        assert sum(each["repair_told"] for each in counts) >= len(alone)
        assert sum(each["repair_untaken"] for each in counts) == 0


async def test_who_makes_up_for_what_is_lost_does_not_take_it_for_used() -> None:
    """It would be copied forward on flash as long as nobody asks for it."""
    async with stage(replicas=2) as cluster:
        for name in NAMES:
            cluster.start(name)
        await anyio.sleep(2)
        await cluster.fill(chains_of("bob", 20), "bob")
        await anyio.sleep(2)
        cluster.kill("store-1")
        await anyio.sleep(2 * HOLD_OFF_S + 4 * IDLE_S)
        nodes = [node for node in cluster.sim.nodes.values() if node.alive]
        assert sum(node.node.counts()["repair_told"] for node in nodes) > 10
        assert [pages_in_use(cluster, node.member_id) for node in nodes] == [0, 0]


def pages_in_use(cluster: Stage, name: str) -> int:
    tiers = cluster.sim.nodes[name].node._tiers
    assert tiers is not None
    return sum(segment.hot_pages for segment in tiers._log.catalog.segments.values())


async def test_who_is_back_in_time_is_not_made_up_for() -> None:
    async with stage(replicas=2) as cluster:
        await filled(cluster)
        cluster.kill("store-1")
        await anyio.sleep(HOLD_OFF_S / 2)
        cluster.start("store-1")
        await anyio.sleep(2 * HOLD_OFF_S)
        told = [node.node.counts()["repair_told"] for node in cluster.sim.nodes.values()]
        assert told == [0, 0, 0]


async def test_a_node_that_takes_nothing_does_not_hold_it_up_for_ever() -> None:
    async with stage(replicas=2) as cluster:
        await filled(cluster)
        cluster.kill("store-1")
        cluster.sim.hang_node("store-2", True)
        await anyio.sleep(HOLD_OFF_S + 60)
        counts = cluster.sim.nodes["store-0"].node.counts()
        assert counts["repair_untaken"] > 0
        cluster.sim.hang_node("store-2", False)
        await anyio.sleep(20)
