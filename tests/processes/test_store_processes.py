"""The store between real processes: on one host and over TCP, kills and stops included."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest

from kvass.common.transport.route import Setting
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.client.tensors import open_store
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
from store_sim import chain_of

pytestmark = [pytest.mark.anyio, pytest.mark.process]
BLOCKS = 64
SOON_S = 5.0  # for a connection's end, which is at once; a patient put has twice as long


@pytest.fixture(params=["local", "tcp"])
def way(request: pytest.FixtureRequest) -> Setting:
    setting: Setting = request.param
    return setting


async def test_blocks_go_from_process_to_process(way: Setting) -> None:
    with started(run_node, config_of(way)) as node:
        address = await node.answer()
        with started(run_worker, way, address, BLOCKS) as other:
            assert await other.answer() == "ready"
            async with worker(way, address, BLOCKS, "self") as (store, memory):
                assert await other.ask("push", 1) == list(range(BLOCKS))
                assert await pull(store, memory, 1, BLOCKS) == set(range(BLOCKS))
                assert await push(store, memory, 2, BLOCKS) == set(range(BLOCKS))
                assert await other.ask("pull", 2) == list(range(BLOCKS))
                counts = await at_rest(store)
                assert counts["visible_blocks"] == 2 * BLOCKS
                assert not store.counts.total(), store.counts
                # Dead, the node is only misses.
                node.kill(signal.SIGKILL)
                with anyio.fail_after(5):
                    assert await pull(store, memory, 1, BLOCKS) == set()
                    assert await push(store, memory, 3, BLOCKS) == set()


async def storm(other: Process, store: StoreClient, verb: str = "storm") -> None:
    """Let the other worker push and drop the same chain, until it is in the middle of a put."""
    assert await other.ask(verb, 1) == "storming"

    async def writing() -> bool:
        return bool((await counts_of(store))["writing_blocks"])

    await until(writing)


@pytest.mark.fault(number=3)
@pytest.mark.fault(number=8)
async def test_a_writer_killed_in_mid_put_leaves_nothing(way: Setting) -> None:
    with started(run_node, config_of(way)) as node:
        address = await node.answer()
        async with worker(way, address, BLOCKS, "self") as (store, memory):
            for _ in range(2):
                with started(run_worker, way, address, BLOCKS) as other:
                    assert await other.answer() == "ready"
                    await storm(other, store, "patient storm")
                    other.kill(signal.SIGKILL)
                    with anyio.fail_after(SOON_S):
                        await at_rest(store)
                    await pull(store, memory, 1, BLOCKS)  # asserts that what is there is right
                    assert await push(store, memory, 1, BLOCKS) == set(range(BLOCKS))
                    await store.drop(keys=chain_of(BLOCKS, seed=1, layout=LAYOUT).keys)
            counts = await at_rest(store)
            assert counts["free_bytes"] == counts["total_bytes"]
            assert counts["corrupt"] == store.counts["pull_corrupt"] == 0


@pytest.mark.fault(number=2)
@pytest.mark.fault(number=3)
async def test_a_writer_stopped_in_mid_put_and_continued(way: Setting) -> None:
    with started(run_node, config_of(way)) as node:
        address = await node.answer()
        with started(run_worker, way, address, BLOCKS) as other:
            assert await other.answer() == "ready"
            async with worker(way, address, BLOCKS, "self") as (store, memory):
                await storm(other, store)
                other.kill(signal.SIGSTOP)
                counts = await at_rest(store)
                # Its slots are used by another chain meanwhile; nothing of it lands there later.
                assert await push(store, memory, 2, BLOCKS) == set(range(BLOCKS))
                for seed in (3, 4):
                    assert await push(store, memory, seed, BLOCKS) == set(range(BLOCKS))
                before = (await counts_of(store))["stored"]
                other.kill(signal.SIGCONT)

                async def went_on() -> bool:
                    now = (await counts_of(store))["stored"]
                    return int(now) > int(before)

                await until(went_on)
                other.kill(signal.SIGKILL)
                counts = await at_rest(store)
                for seed in (2, 3, 4):
                    assert await pull(store, memory, seed, BLOCKS) == set(range(BLOCKS))
                assert counts["corrupt"] == 0


@pytest.mark.fault(number=33)
async def test_a_node_stopped_and_continued_is_misses_then_itself_again(way: Setting) -> None:
    with started(run_node, config_of(way)) as node:
        address = await node.answer()
        async with worker(way, address, BLOCKS, "self") as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == set(range(BLOCKS))
            node.kill(signal.SIGSTOP)
            with anyio.fail_after(5):
                assert await pull(store, memory, 1, BLOCKS) == set()
                assert await push(store, memory, 2, BLOCKS) == set()
            node.kill(signal.SIGCONT)

            async def back() -> bool:
                return await pull(store, memory, 1, BLOCKS) == set(range(BLOCKS))

            await until(back)
            await at_rest(store)


def test_a_client_without_memory_loads_neither_torch_nor_nixl() -> None:
    code = (
        "import sys, kvass.kvstore.client.store, kvass.kvstore.placement\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'nixl_cu12', 'nixl')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_the_slab_of_a_killed_node_is_the_machine_s_again() -> None:
    """A client maps it to read: it must not keep alive what nobody serves."""

    def mapped() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if "/memfd:kvass" in line and " r--s " in line]

    assert not mapped()
    with started(run_node, config_of("local", slab_blocks=BLOCKS)) as node:
        address = await node.answer()
        async with worker("local", address, BLOCKS, "self") as (store, memory):
            assert len(await push(store, memory, 1, BLOCKS)) == BLOCKS
            assert len(await pull(store, memory, 1, BLOCKS)) == BLOCKS
            assert len(mapped()) == 1
            node.kill(signal.SIGKILL)
            with anyio.fail_after(5):
                while mapped():  # noqa: ASYNC110 (a mapping that goes wakes nobody)
                    await anyio.sleep(0.01)


async def test_the_slots_of_a_client_that_has_left_are_the_machine_s_again() -> None:
    """Its process goes on: an `open_store` that ends gives back what the node had mapped."""

    def mapped(pid: int) -> int:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return sum("/memfd:kvass" in line and " r--s " in line for line in lines)

    with started(run_node, config_of("local", slab_blocks=BLOCKS)) as node:
        address, pid = await node.answer(), node.process.pid
        assert pid is not None
        for number in range(3):
            block = np.full(LAYOUT.block_size, number, dtype=np.uint8)
            async with open_store([address], like=block, name="slots") as store:
                result = await store.put(store.chain([number] * 16), {0: block})
                assert set(result.stored) == {0} and mapped(pid) == 1
            with anyio.fail_after(5):
                while mapped(pid):  # noqa: ASYNC110 (a mapping that goes wakes nobody)
                    await anyio.sleep(0.01)
