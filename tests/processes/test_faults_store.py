"""Faults below HTTP, on a store node and workers in processes of their own: what is said to be
there is right, byte by byte, and nothing is left over."""

from __future__ import annotations

import signal
import time

import anyio
import numpy as np
import psutil
import pytest

import foreign_memory
from faulty_peer import (
    LIES,
    Lie,
    late_threads,
    lying_transports,
    run_late_node,
    run_lying_node,
    run_node_at,
    run_stopping_reader,
)
from kvass.common.errors import KvassError, Unavailable
from kvass.common.transport import nixl
from kvass.common.transport.route import Setting
from kvass.common.transport.seam import Copies
from kvass.kvstore import messages as m
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.links import NodeLink
from kvass.kvstore.words import packed, unpacked
from ports import free_port
from store_peer import (
    LAYOUT,
    Process,
    config_of,
    pull,
    push,
    run_node,
    run_worker,
    started,
    worker,
)
from store_rest import at_rest, counts_of, until
from store_sim import SlotArray, chain_of, content

pytestmark = [pytest.mark.anyio, pytest.mark.process]
BLOCKS = 64
EVERY = set(range(BLOCKS))
CANCELLED = 12  # calls, each a little later in its course
LATE_S = 0.02
LATE_TAKE_S = 0.3


@pytest.fixture(params=["local", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


async def visible(store: StoreClient, seed: int) -> set[int]:
    chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
    found = await store.lookup(chain, [(0, BLOCKS)], deadline_s=3)
    return {index for first, stop in found for index in range(first, stop)}


@pytest.mark.fault(number=1)
async def test_a_reader_that_outlives_its_lease_discards_what_it_read() -> None:
    """It stops between lease and copy, until its blocks' slots have other owners."""
    with started(run_node, config_of("local", slab_blocks=BLOCKS)) as node:
        address = await node.answer()
        async with worker("local", address, BLOCKS, "self") as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == EVERY
            with started(run_stopping_reader, "local", address, 1, BLOCKS) as reader:
                assert await reader.answer() == "ready"
                process = psutil.Process(reader.process.pid)
                await until(lambda: is_stopped(process))

                async def its_leases_are_over() -> bool:
                    counts = await counts_of(store)
                    return counts["leases_lost"] == 1 and not counts["leases"]

                await until(its_leases_are_over)
                assert await push(store, memory, 2, BLOCKS) == EVERY
                reader.kill(signal.SIGCONT)
                there, counted = await reader.answer()
                assert (there, counted["pull_corrupt"]) == ([], BLOCKS)

                async def it_knows_why() -> bool:
                    there, counted = await reader.ask("again")
                    assert there == []
                    return bool(counted.get("lease_lost"))

                await until(it_knows_why)
            assert await pull(store, memory, 2, BLOCKS) == EVERY
            counts = await at_rest(store)
            assert (counts["corrupt"], counts["visible_blocks"]) == (0, BLOCKS)


async def is_stopped(process: psutil.Process) -> bool:
    return bool(process.status() == psutil.STATUS_STOPPED)


@pytest.mark.fault(number=2)
async def test_slots_of_cancelled_pulls_get_no_late_byte(way: Setting) -> None:
    with started(run_node, config_of(way)) as node, late_threads(lambda: time.sleep(LATE_S)):
        async with worker(way, await node.answer(), BLOCKS, "self") as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == EVERY
            chain, every = chain_of(BLOCKS, seed=1, layout=LAYOUT), range(BLOCKS)
            took_s, cancelled = 0.0, 0
            for _ in range(2):  # the first one connects
                begun_s = time.monotonic()
                assert await store.pull(chain, every, every, deadline_s=3) == EVERY
                took_s = time.monotonic() - begun_s
            for attempt in range(CANCELLED):  # from the first moment to the last
                with anyio.move_on_after(took_s * attempt / CANCELLED) as scope:
                    await store.pull(chain, every, every, deadline_s=3)
                cancelled += scope.cancelled_caught
                memory.array[:] = attempt  # the slots have another owner now
                await anyio.sleep(2 * LATE_S)
                assert (memory.array == attempt).all(), f"late bytes, attempt {attempt}"
            assert cancelled >= CANCELLED / 4
            assert await pull(store, memory, 1, BLOCKS) == EVERY
            await at_rest(store)


@pytest.mark.fault(number=2)
async def test_slots_of_a_cancelled_push_get_no_late_byte(way: Setting) -> None:
    """Its writer gives its own slots to others at once. The node, whose thread is about to take
    their bytes, gives its slots to another process once that thread has; that process's bytes come
    by another way, so that they wait for no thread that is late."""
    other_way: Setting = "tcp" if way == "local" else "local"
    with started(run_late_node, config_of("auto", slab_blocks=BLOCKS)) as node:
        address = await node.answer()
        with started(run_worker, other_way, address, BLOCKS) as other:
            assert await other.answer() == "ready"
            async with worker(way, address, BLOCKS, "self") as (store, memory):
                for seed in (1, 2):
                    begun_s = await push_and_leave(node, store, memory, seed)
                    memory.array[:] = 0x77

                    async def is_stored(seed: int = 10 + seed) -> bool:
                        return set(await other.ask("push", seed)) == EVERY

                    await until(is_stored)
                    await anyio.sleep(max(0.0, begun_s + 1.5 * LATE_TAKE_S - time.monotonic()))
                    assert await pull(store, memory, 10 + seed, BLOCKS) == EVERY
                    assert await pull(store, memory, seed, BLOCKS) == set()
                counts = await at_rest(store)
                assert (counts["corrupt"], counts["free_bytes"]) == (0, 0)


async def push_and_leave(node: Process, store: StoreClient, memory: SlotArray, seed: int) -> float:
    """Cancel a push as soon as the node is about to take its bytes; return when that was."""
    node.pipe.send(LATE_TAKE_S)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(push, store, memory, seed, BLOCKS)
        assert await node.answer() == "taking"
        begun_s = time.monotonic()
        tasks.cancel_scope.cancel()
    assert time.monotonic() - begun_s < LATE_TAKE_S, "the writer waits for nobody"
    return begun_s


@pytest.mark.fault(number=9)
async def test_two_writers_and_a_reader_of_the_same_keys_at_once(way: Setting) -> None:
    """One copy of each block is kept; who reads meanwhile has whole blocks or misses."""
    with started(run_node, config_of(way)) as node:
        address = await node.answer()
        with (
            started(run_worker, way, address, BLOCKS) as one,
            started(run_worker, way, address, BLOCKS) as other,
        ):
            assert [await one.answer(), await other.answer()] == ["ready", "ready"]
            async with worker(way, address, BLOCKS, "self") as (store, memory):
                for seed in range(1, 4):
                    for each in (one, other):
                        each.pipe.send(("push", seed))
                    seen = set[int]()
                    while seen != EVERY:
                        there = await pull(store, memory, seed, BLOCKS)  # asserts their bytes
                        assert seen <= there
                        seen = there
                    stored = [await each.answer() for each in (one, other)]
                    assert set(stored[0]) | set(stored[1]) == EVERY
                    counts = await at_rest(store)
                    assert counts["visible_blocks"] == counts["stored"] == seed * BLOCKS
                size = int(counts["total_bytes"]) - int(counts["free_bytes"])
                assert size == counts["visible_bytes"] == 3 * BLOCKS * LAYOUT.block_size


@pytest.mark.fault(number=11)
@pytest.mark.fault(number=16)
@pytest.mark.parametrize("lie", LIES)
async def test_transfers_that_lie_about_success(way: Setting, lie: Lie) -> None:
    """Same host: whoever takes bytes reads them. TCP: whoever gives bytes writes them."""
    with started(run_lying_node, config_of(way)) as node, lying_transports(nixl) as own:
        async with worker(way, await node.answer(), BLOCKS, "self") as (store, memory):

            async def lies(of_node: Lie, of_self: Lie) -> int:
                told = sum(each.told for each in own)
                for each in own:
                    each.lie, each.told = of_self, 0
                return told + int(await node.ask(of_node))

            await lies(*((lie, "") if way == "local" else ("", lie)))
            assert await push(store, memory, 1, BLOCKS) == set()
            assert await visible(store, 1) == set(), "what failed its check can be found"
            assert await lies("", "")
            counts = await at_rest(store)
            assert counts["put_corrupt"] == BLOCKS
            assert counts["free_bytes"] == counts["total_bytes"]
            assert await push(store, memory, 1, BLOCKS) == EVERY

            await lies(*(("", lie) if way == "local" else (lie, "")))
            assert await pull(store, memory, 1, BLOCKS) == set()
            assert await lies("", "")
            assert store.counts["pull_corrupt"] == BLOCKS, store.counts
            assert await pull(store, memory, 1, BLOCKS) == EVERY, "the node's blocks are right"
            await at_rest(store)


@pytest.mark.fault(number=11)
@pytest.mark.fault(number=16)
async def test_a_block_that_rots_in_the_store_is_a_miss_and_never_found_again(way: Setting) -> None:
    with started(run_node, config_of(way)) as node:
        async with worker(way, await node.answer(), BLOCKS, "self") as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == EVERY
            key = chain_of(BLOCKS, seed=1, layout=LAYOUT).keys[5]
            pid = node.process.pid
            assert pid is not None
            # Over TCP they came through a landing buffer, which keeps them until others come.
            assert await push(store, memory, 2, BLOCKS) == EVERY
            (place,) = foreign_memory.find(pid, content(key, LAYOUT.block_size).tobytes())
            foreign_memory.flip(pid, place + 100_000)
            assert await pull(store, memory, 1, BLOCKS) == EVERY - {5}

            async def is_dropped() -> bool:
                return await visible(store, 1) == EVERY - {5}

            await until(is_dropped)
            counts = await at_rest(store)
            assert counts["corrupt"] == store.counts["pull_corrupt"] == 1
            assert await push(store, memory, 1, BLOCKS) == EVERY
            assert await pull(store, memory, 1, BLOCKS) == EVERY


@pytest.mark.fault(number=17)
@pytest.mark.fault(number=36)
async def test_a_new_node_at_an_old_address_honours_no_old_handle(way: Setting) -> None:
    port = free_port()
    with started(run_node_at, config_of(way), port) as first:
        address = await first.answer()
        async with worker(way, address, BLOCKS, "self") as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == EVERY
            link = store._router.link("store-0")
            old = await link.ways(deadline_s=3)
            places, put_id = await lease_and_put(link, store)
            first.kill(signal.SIGKILL)
            first.process.join(5)
            with started(run_node_at, config_of(way), port) as second:
                assert await second.answer() == address
                await is_a_stranger(store, memory, places, put_id, old.start_id)
                assert (await link.ways(deadline_s=3)).start_id != old.start_id


async def lease_and_put(link: NodeLink, store: StoreClient) -> tuple[m.Places, str]:
    """Take a lease, and begin a put where it is more than one call; return the handles."""
    chain = chain_of(BLOCKS, seed=1, layout=LAYOUT)
    spans = tuple(m.spans_of(chain, [(0, BLOCKS)]))
    get = m.GetBegin(spans, LAYOUT.block_size, LAYOUT.head_groups, (0, 1))
    places = await link.call(get, deadline_s=3)
    assert len(places.indices) == BLOCKS
    other = chain_of(1, seed=2, layout=LAYOUT)
    offer = m.Offer(
        put_id=store._moving().next_put(),
        spans=tuple(m.spans_of(other, [(0, 1)])),
        namespace=other.namespace,
        tenant="",
        writer="self",
        token_count=LAYOUT.block_tokens,
        block_size=LAYOUT.block_size,
        head_groups=LAYOUT.head_groups,
        groups=(0, 1),
        deadline_s=20.0,
    )
    if (await link.ways(deadline_s=3)).put_way == "write":
        assert (await link.call(m.PutBegin(offer), deadline_s=3)).granted == ((0, 1),)
    return places, offer.put_id


async def is_a_stranger(
    store: StoreClient, memory: SlotArray, places: m.Places, put_id: str, old_start_id: str
) -> None:
    """Show that no handle of the node before means anything to the one that is there now."""
    link = store._router.link("store-0")

    async def answers() -> bool:
        return bool(await store.stats())

    await until(answers)
    for request in (m.GetRenew(places.lease_id), m.GetEnd(places.lease_id)):
        assert not (await link.call(request, deadline_s=3)).held
    key = chain_of(1, seed=2, layout=LAYOUT).keys[0]
    commit = m.PutCommit(
        put_id=put_id,
        keys=(key,),
        checksums=packed([1]),
        deadline_s=3.0,
    )
    try:
        assert not (await link.call(commit, deadline_s=3)).stored
    except KvassError:
        pass  # it refuses to be asked before an attach
    reader = store._moving().endpoints.reader
    if reader is not None:
        there = unpacked(places.addresses, "addresses")[:1]
        size = np.array([LAYOUT.block_size], dtype=np.uint64)
        copies = Copies(memory.addresses([0]), there, size)
        with pytest.raises(Unavailable):
            await reader.read(old_start_id, copies, deadline_s=1)

    assert await pull(store, memory, 1, BLOCKS) == set()
    assert await push(store, memory, 3, BLOCKS) == EVERY
    assert await pull(store, memory, 3, BLOCKS) == EVERY
    counts = await at_rest(store)
    assert (counts["visible_blocks"], counts["corrupt"]) == (BLOCKS, 0)
