"""Nodes that may have missed an erasure which nobody can tell them any more: they discard all they
have, and nothing of it is served meanwhile, from wherever it may come."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
import trio.testing

from flash_sim import give_flash
from kvass.kvstore import messages as m
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.placement import StoreNode
from memory_disk import MemoryDisk
from store_sim import Cluster, SimNode, chain_of, pull, push
from wires import Fate

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def slowed(node: SimNode, by_s: float) -> None:
    """Let what is erased on a node's flash take longer."""
    tiers = node.node._tiers
    assert tiers is not None
    drop = tiers.drop

    async def slow(order: DropOrder, gone: Sequence[bytes] = ()) -> int:
        await anyio.sleep(by_s)
        return await drop(order, gone)

    tiers.drop = slow  # type: ignore[method-assign]


async def test_flash_stays_closed_until_all_of_it_is_erased() -> None:
    """Somebody says that the node has missed an erasure, and another one, meanwhile, that it has
    not."""
    async with anyio.create_task_group() as tasks:

        def tell_node(node: SimNode, nodes: list[StoreNode]) -> None:
            hidden = {"A"} if node.member_id == "B" else set()
            node.set_nodes([n for n in nodes if n.member_id not in hidden])

        def weather(one: str, other: str) -> Fate:
            delays = {frozenset("AC"): 4.0, frozenset("BC"): 0.3}
            return Fate(delay_s=delays.get(frozenset((one, other)), 0.0))

        sim, disk = Cluster(tasks, tell_node=tell_node, weather=weather), MemoryDisk()
        give_flash(sim.add_node("B", host="host-b"), disk, seed=1)
        worker, chain = sim.add_worker(), chain_of(8)
        await anyio.sleep(1)
        await push(worker, chain, range(8))
        await worker.store.lookup(chain, [(0, 8)], deadline_s=1)
        await anyio.sleep(1)
        sim.kill_node("B")
        sim.share_view()
        await anyio.sleep(1)
        sim.add_node("C", host="host-c")
        heard = sim.add_node("A", host="host-a").node._erasing.heard
        heard._note_past(b"i" * 16, anyio.current_time() - 900)
        node = sim.add_node("B", host="host-b")
        give_flash(node, disk, seed=2)
        slowed(node, 5.0)
        await anyio.sleep(4)
        assert await pull(worker, chain, range(8)) == set()
        await anyio.sleep(10)
        names = ("flash_closed", "flash_blocks", "visible_blocks")
        assert [node.node.counts()[name] for name in names] == [0, 0, 0]
        tasks.cancel_scope.cancel()


async def test_nothing_is_copied_from_who_has_missed_the_same_erasure() -> None:
    """While this node discards what it has, it says to others that they may have missed it, too."""
    async with anyio.create_task_group() as tasks:

        def weather(one: str, other: str) -> Fate:
            return Fate(delay_s=2.0 if {one, other} == {"X", "A"} else 0.0)

        sim = Cluster(tasks, weather=weather)
        sim.add_node("X", host="host-x")
        worker, chain = sim.add_worker(), chain_of(8)
        await push(worker, chain, range(8))
        node = sim.add_node("B", host="host-b")
        give_flash(node, MemoryDisk(), seed=1)
        slowed(node, 3.0)
        await anyio.sleep(10)
        heard = sim.add_node("A", host="host-a").node._erasing.heard
        heard._note_past(b"i" * 16, anyio.current_time() - 900)
        await anyio.sleep(0.7)
        assert node.node._erasing._owes_all
        spans = tuple(m.spans_of(chain, [(0, 8)]))
        link = worker.store.router.link("B")
        await link.call(m.Fill(source="X", spans=spans), deadline_s=1.0)
        await anyio.sleep(120)
        held = [sim.nodes[name].index.counts()["visible_blocks"] for name in "XB"]
        assert held == [0, 0]
        tasks.cancel_scope.cancel()
