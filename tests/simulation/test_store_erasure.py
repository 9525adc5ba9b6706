"""Erasing all over a cluster: blocks, copies under way, tenants, a writer that computes wrong."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec
import pytest
import trio.testing

from kvass.common.errors import Unavailable
from kvass.common.rpc.server import Call
from kvass.common.wire import Message
from kvass.kvstore import messages as m
from kvass.kvstore.client import erase
from kvass.kvstore.index.erasures import BAR_S
from kvass.kvstore.node.copies.handover import HOLD_OFF_S
from store_sim import Cluster, Handlers, Worker, answered, at_rest, chain_of, cluster, pull, push
from wires import Fate

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def visible(sim: Cluster) -> int:
    return sum(node.index.counts()["visible_blocks"] for node in sim.nodes.values())


def slow_drop(member_id: str, handlers: Handlers) -> Handlers:
    """Let one node hear of an erasure three seconds after the other."""

    async def late(call: Call) -> Message | None:
        await anyio.sleep(3.0)
        return await answered(handlers[m.Drop], call)

    return {**handlers, m.Drop: late} if member_id == "store-1" else dict(handlers)


async def test_a_copy_from_a_node_not_yet_told_brings_nothing_back() -> None:
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, around=slow_drop, replicas=2)
        sim.add_node("store-0")
        sim.add_node("store-1", host="host-1")
        worker = sim.add_worker()
        chain = chain_of(8)
        await push(worker, chain, range(8), tenant="alice")
        await anyio.sleep(1.0)
        assert visible(sim) == 16

        async def repair() -> None:
            await anyio.sleep(1.0)  # store-0 has erased, store-1 has not
            assert visible(sim) == 8
            spans = tuple(m.spans_of(chain, [(0, 8)]))
            link = worker.store.router.link("store-0")
            await link.call(m.Fill(source="store-1", spans=spans), deadline_s=1.0)
            await anyio.sleep(1.0)
            assert visible(sim) == 0, "it was told of the erasure before it was copied from"

        tasks.start_soon(repair)
        assert await worker.store.drop(tenant="alice") == 16, "and counted once"
        await anyio.sleep(2.0)
        assert visible(sim) == 0
        # What is put anew is new, and so are copies of it.
        assert await push(worker, chain, range(8), tenant="alice") == ((0, 8),)
        await anyio.sleep(1.0)
        assert visible(sim) == 16
        tasks.cancel_scope.cancel()


async def test_blocks_put_after_a_drop_have_their_copies_and_keep_them_over_restarts() -> None:
    """A node that comes back is told of the old drop, and takes copies of what came after it."""
    async with cluster(replicas=2) as sim:
        for number in range(2):
            sim.add_node(f"store-{number}", host=f"host-{number}")
        worker, chain = sim.add_worker(), chain_of(8)
        await push(worker, chain, range(8), tenant="alice")
        await worker.store.drop(tenant="alice")
        assert await push(worker, chain, range(8), tenant="alice") == ((0, 8),)
        await anyio.sleep(1.0)
        assert visible(sim) == 16
        for number in (1, 0):
            sim.kill_node(f"store-{number}")
            del sim.nodes[f"store-{number}"]
            sim.share_view()
            await anyio.sleep(1.0)
            sim.add_node(f"store-{number}", host=f"host-{number}")
            await anyio.sleep(HOLD_OFF_S + 5.0)
            assert visible(sim) == 16
        assert await pull(worker, chain, range(8)) == set(range(8))


async def test_a_drain_right_after_a_drop_hands_over_what_came_since() -> None:
    async with cluster() as sim:
        node = sim.add_node("store-0")
        worker, chain = sim.add_worker(), chain_of(8)
        await worker.store.drop(tenant="alice")
        await push(worker, chain, range(8), tenant="alice")
        sim.add_node("store-1", host="host-1")
        node.node.drain()
        await anyio.sleep(5.0)
        counts = node.node.counts()
        assert (counts["handover_handed"], counts["handover_refused"]) == (8, 0)
        assert counts["drained"] == 1


def slow_description(member_id: str, handlers: Handlers) -> Handlers:
    """Let what a node says of its blocks be a second old."""

    async def late(call: Call) -> Message | None:
        reply = await answered(handlers[m.Describe], call)
        await anyio.sleep(0.5)
        return reply

    return {**handlers, m.Describe: late}


async def test_what_was_described_before_an_erasure_is_not_copied_after_it() -> None:
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, around=slow_description, replicas=2)
        sim.add_node("store-0")
        sim.add_node("store-1", host="host-1")
        worker = sim.add_worker()
        await push(worker, chain_of(8), range(8), tenant="alice")
        await anyio.sleep(0.3)  # the copies are asked for, and described
        assert await worker.store.drop(tenant="alice") == 8
        await anyio.sleep(2.0)
        assert visible(sim) == 0
        refused = [node.index.counts()["erased_refused"] for node in sim.nodes.values()]
        assert sorted(refused) == [0, 8]
        # It asked once more, when the other had erased them too.
        assert await push(worker, chain_of(8), range(8), tenant="alice") == ((0, 8),)
        await anyio.sleep(3.0)
        assert visible(sim) == 16
        tasks.cancel_scope.cancel()


async def test_a_copy_under_way_is_erased_with_the_rest() -> None:
    async with cluster(replicas=2) as sim:
        sim.add_node("store-0")
        sim.add_node("store-1", host="host-1")
        worker = sim.add_worker()
        chain = chain_of(32)
        tasks = sim.tasks
        tasks.start_soon(push, worker, chain, range(32))
        for _ in range(40):  # whatever is under way at each moment
            await anyio.lowlevel.checkpoint()
            await worker.store.drop(writer="prefill-0")
        await anyio.sleep(2.0)
        await worker.store.drop(writer="prefill-0")
        await anyio.sleep(2.0)
        assert visible(sim) == 0
        for name in ("store-0", "store-1"):
            await at_rest(sim, name)


async def test_a_tenants_blocks_go_and_only_his() -> None:
    async with cluster() as sim:
        sim.add_node("store-0")
        worker = sim.add_worker()
        alice, bob = chain_of(8, salt=b"a"), chain_of(8, salt=b"b")
        await push(worker, alice, range(8), tenant="alice")
        await push(worker, bob, range(8), tenant="bob")
        used = await erase.tenants(worker.store.router, 1.0)
        assert [(each.tenant, each.blocks) for each in used] == [("alice", 8), ("bob", 8)]
        assert await worker.store.drop(tenant="alice") == 8
        assert await pull(worker, alice, range(8)) == set()
        assert await pull(worker, bob, range(8)) == set(range(8))


def untrue(member_id: str, handlers: Handlers) -> Handlers:
    """Let nodes describe other blocks than they are asked about."""

    async def other(call: Call) -> Message | None:
        reply = await answered(handlers[m.Describe], call)
        assert isinstance(reply, m.Described)
        shapes = [msgspec.structs.replace(shape, index=shape.index + 100) for shape in reply.shapes]
        return m.Described(shapes=tuple(shapes))

    return {**handlers, m.Describe: other}


async def test_what_was_not_asked_about_is_not_copied() -> None:
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, around=untrue, replicas=2)
        nodes = [sim.add_node(f"store-{number}", host=f"host-{number}") for number in range(2)]
        await push(sim.add_worker(), chain_of(8), range(8))
        await anyio.sleep(5)
        assert visible(sim) == 8
        assert [node.node.faults["bugs"] for node in nodes] == [0, 0]
        tasks.cancel_scope.cancel()


async def test_copies_are_taken_while_drops_come_without_a_pause() -> None:
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, replicas=2, weather=lambda a, b: Fate(delay_s=0.02))
        nodes = [sim.add_node(f"store-{number}", host=f"host-{number}") for number in range(2)]
        worker, other = sim.add_worker(), sim.add_worker("prefill-1")
        await anyio.sleep(5)

        async def drop() -> None:
            with suppress(Unavailable):  # when the cluster ends
                while True:
                    await other.store.drop(tenant="nobody")

        for _ in range(4):
            tasks.start_soon(drop)
        await anyio.sleep(2)
        for seed in range(4):
            assert await push(worker, chain_of(8, seed=seed), range(8)) == ((0, 8),)
        await anyio.sleep(5)
        assert visible(sim) == 64
        assert [node.node.counts()["fill_failed"] for node in nodes] == [0, 0]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
async def test_copies_are_taken_where_more_was_erased_than_is_remembered(delay_s: float) -> None:
    """How long ago that was is known less and less exactly with each who tells it."""
    async with anyio.create_task_group() as tasks:
        sim = Cluster(tasks, replicas=2, weather=lambda a, b: Fate(delay_s=delay_s))
        heard = sim.add_node("store-0", host="host-0").node._erasing.heard
        heard._note_forgotten(anyio.current_time() - 1000.0)
        heard._note_past(b"i" * 16, anyio.current_time() - 900.0)
        sim.add_node("store-1", host="host-1")
        await anyio.sleep(130)
        await push(sim.add_worker(), chain_of(8), range(8))
        await anyio.sleep(5)
        assert visible(sim) == 16
        tasks.cancel_scope.cancel()


async def two_writers(sim: Cluster) -> tuple[Worker, Worker]:
    for number in range(2):
        sim.add_node(f"store-{number}", blocks=400)
    return sim.add_worker("prefill-0"), sim.add_worker("prefill-1")


async def test_what_was_computed_upon_a_barred_writers_blocks_goes_too() -> None:
    async with cluster() as sim:
        wrong, right = await two_writers(sim)
        chain, other = chain_of(160), chain_of(64, seed=1)
        await push(right, chain, range(0, 8))
        await push(wrong, chain, range(8, 16))
        for first in range(16, 160, 48):  # of segments on both nodes, all upon what is wrong
            await push(right, chain, range(first, first + 48))
        await push(right, other, range(64))
        assert await erase.bar(right.store.router, "prefill-0", 5.0) == 152
        assert await right.store.lookup(chain, [(0, 160)], deadline_s=1.0) == [(0, 8)]
        assert await right.store.lookup(other, [(0, 64)], deadline_s=1.0) == [(0, 64)]


async def test_nothing_of_a_barred_writer_is_taken_for_a_while() -> None:
    async with cluster() as sim:
        wrong, right = await two_writers(sim)
        chain = chain_of(16)
        await erase.bar(right.store.router, "prefill-0", 5.0)
        assert await push(wrong, chain, range(8)) == ()
        assert wrong.store.counts["push_full"] == 8
        assert await push(right, chain, range(8)) == ((0, 8),)
        assert await pull(wrong, chain, range(8)) == set(range(8))  # reading harms nobody
        await anyio.sleep(BAR_S)
        assert await push(wrong, chain, range(8, 16)) == ((8, 16),)
