"""A store node with a flash folder, as a process: killed at any moment, on disks that fail.

KVASS_KILLS=500 pytest -s tests/processes/test_flash_processes.py -k kill     soaks
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from flash_model import SMALL, block_of, open_log
from kvass.common.errors import Unavailable
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.flash.disk import RealDisk
from store_alone import NodeProcess, bounded_node
from store_peer import LAYOUT, pull, push, worker
from store_rest import at_rest, counts_of, until
from store_sim import SlotArray, chain_of, content

pytestmark = [pytest.mark.anyio, pytest.mark.process]
BLOCKS = 16
CHAINS = 6  # of a slab of 109 blocks: more than half of it, so that they go down
KILLS = int(os.environ.get("KVASS_KILLS", "6"))
# Chains that are looked for, and that death found in the middle: old ones are erased, long before
# the log, which has room for ten times as many, gives their files back.
KEPT, DOUBTFUL = 18, 6
PACE_S = 0.02
FULL_MAX = 0.8  # of the log
PATIENCE_S = 60.0  # twice as long as a tier steps aside


@contextmanager
def flash_node(
    folder: Path, *, segment_bytes: int = 8 << 20, open_files_max: int | None = None
) -> Iterator[NodeProcess]:
    with bounded_node(
        open_files_max, "--standalone", "--id", "store-0", "--slab-bytes", "20MiB",
        "--set", f'store.flash_dir="{folder}"', "--set", "store.flash_bytes=536870912",
        "--set", f"store.flash_segment_bytes={segment_bytes}",
    ) as found:  # fmt: skip
        yield found


@asynccontextmanager
async def client(process: NodeProcess) -> AsyncIterator[tuple[StoreClient, SlotArray]]:
    async with worker("local", process.address, BLOCKS, "self") as opened:
        yield opened


async def put(store: StoreClient, memory: SlotArray, seed: int) -> None:
    """Put a chain and ask for it: from then on it is worth a place on flash."""
    assert await push(store, memory, seed, BLOCKS) == set(range(BLOCKS))
    chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
    assert await store.lookup(chain, [(0, BLOCKS)], deadline_s=3) == [(0, BLOCKS)]


async def has_on_flash(store: StoreClient, blocks: int) -> None:
    async def there() -> bool:
        return (await counts_of(store))["flash_blocks"] == blocks

    await until(there)


async def fill(process: NodeProcess) -> None:
    async with client(process) as (store, memory):
        for seed in range(CHAINS):
            await put(store, memory, seed)
        await has_on_flash(store, CHAINS * BLOCKS)
        process.process.send_signal(signal.SIGKILL)


def flip(folder: Path, wanted: NDArray[np.uint8]) -> None:
    """Change one bit of a block, wherever it is."""
    for path in folder.glob("*/segment-*"):
        at = path.read_bytes().find(wanted[:256].tobytes())
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([wanted[1000] ^ 4]))
            return
    raise AssertionError("no file has the block")


async def test_a_flipped_bit_is_one_miss(tmp_path: Path) -> None:
    with flash_node(tmp_path) as first:
        await fill(first)
    flip(tmp_path, content(chain_of(BLOCKS, seed=3, layout=LAYOUT).keys[5], LAYOUT.block_size))
    with flash_node(tmp_path) as second:
        async with client(second) as (store, memory):
            assert (await counts_of(store))["flash_blocks"] == CHAINS * BLOCKS
            for seed in range(CHAINS):
                lost = {5} if seed == 3 else set()
                assert await pull(store, memory, seed, BLOCKS) == set(range(BLOCKS)) - lost
            counts = await at_rest(store)
            assert counts["flash_corrupt"] == 1 and counts["flash_blocks"] == CHAINS * BLOCKS - 1
        second.until("is corrupt; it is not found any more")


async def test_a_folder_that_cannot_be_used_is_said_and_memory_serves(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with flash_node(tmp_path / "file" / "flash") as process:
        async with client(process) as (store, memory):
            await put(store, memory, 1)
            assert await pull(store, memory, 1, BLOCKS) == set(range(BLOCKS))
            assert (await counts_of(store))["flash_off"] == 1
            with pytest.raises(Unavailable, match=r"store-0: flash: cannot use .* Not a"):
                await store.drop(tenant="")
            assert await pull(store, memory, 1, BLOCKS) == set()
        process.until("cannot use .*file/flash.*: Not a directory: the node runs without flash")
        process.until("Mend store.flash_dir, then start the node again")
        assert process.said.count("ERROR") == 1


async def test_a_disk_that_becomes_full_is_said_once_and_memory_serves(tmp_path: Path) -> None:
    with flash_node(tmp_path) as process:
        async with client(process) as (store, memory):
            resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            for seed in range(2 * CHAINS):  # more than memory holds: it is evicted from
                await put(store, memory, seed)

            async def refused() -> bool:
                counts = await counts_of(store)
                return bool(counts["flash_refused"]) and not counts["flash_waiting_blocks"]

            await until(refused)
            last = 2 * CHAINS - 1
            assert await pull(store, memory, last, BLOCKS) == set(range(BLOCKS))
            counts = await at_rest(store)
            assert counts["flash_full"] == 1 and counts["flash_blocks"] == 0
        process.until("cannot create .*/segment-.*: File too large: nothing is written to flash")
        assert process.said.count("nothing is written") == 1


def segments_in(root: Path) -> set[str]:
    return {path.name for path in root.glob("*/segment-*")}


async def test_a_folder_that_is_removed_while_it_runs_is_made_again(tmp_path: Path) -> None:
    with flash_node(tmp_path / "flash", segment_bytes=4 << 20) as process:
        async with client(process) as (store, memory):
            for seed in range(CHAINS):
                await put(store, memory, seed)
            await has_on_flash(store, CHAINS * BLOCKS)
            shutil.rmtree(tmp_path / "flash")
            for seed in range(CHAINS, 3 * CHAINS):
                await put(store, memory, seed)
            last = 3 * CHAINS - 1
            process.until("was removed, or another put in its place: it is made anew")
            process.until("blocks are gone with the folder that was removed")

            async def written() -> bool:
                counts = await counts_of(store)
                return bool(counts["flash_blocks"]) and not counts["flash_waiting_blocks"]

            await until(written)
            assert await pull(store, memory, last, BLOCKS) == set(range(BLOCKS))
            counts = await at_rest(store)
            assert counts["flash_off"] == counts["flash_full"] == counts["bugs"] == 0
        process.process.send_signal(signal.SIGKILL)
    with flash_node(tmp_path / "flash", segment_bytes=4 << 20) as second:
        async with client(second) as (store, memory):
            assert int((await counts_of(store))["flash_blocks"]) > 0


async def test_a_node_with_more_files_than_it_may_open_serves_the_newest(tmp_path: Path) -> None:
    small = replace(SMALL, flash_bytes=400 * SMALL.segment_bytes)
    log = open_log(RealDisk(tmp_path / "node-0"), small)
    log.append(block_of(number) for number in range(1500))
    log.close()
    names = segments_in(tmp_path)
    assert len(names) > 160
    with flash_node(tmp_path, segment_bytes=SMALL.segment_bytes, open_files_max=160) as process:
        async with client(process) as (store, memory):
            assert await push(store, memory, 1, BLOCKS) == set(range(BLOCKS))
            assert await pull(store, memory, 1, BLOCKS) == set(range(BLOCKS))
            counts = await counts_of(store)
            unopened = int(counts["flash_unopened_files"])
            assert len(names) - 80 <= unopened < len(names) and counts["flash_blocks"]
            with pytest.raises(Unavailable, match="files that could not be opened were not erased"):
                await store.drop(tenant="nobody")
        process.until(f"{unopened} of {len(names)} files are not opened, since 80 may be open")
    assert names <= segments_in(tmp_path), "nothing is deleted"


@dataclass
class Known:
    """What must be there and what must not be, over all lives, in `folder`. Mutable fields: seeds
    of chains, and the `process` of this life."""

    folder: Path
    process: NodeProcess | None = None
    sure: list[int] = field(default_factory=list)  # on flash, whole
    doubtful: list[int] = field(default_factory=list)  # in whatever state death found them
    erased: list[int] = field(default_factory=list)  # for good
    next: int = 0

    async def check(self, store: StoreClient, memory: SlotArray) -> None:
        """`pull` asserts that every byte is right."""
        for seed in self.sure:
            await self.check_sure(store, memory, seed)
        for seed in self.doubtful:
            await pull(store, memory, seed, BLOCKS)
        for seed in self.erased[-DOUBTFUL:]:
            assert await pull(store, memory, seed, BLOCKS) == set(), f"{seed} came back"
        counts = {name: int(n) for name, n in (await at_rest(store)).items() if name != "id"}
        full = counts["flash_used_bytes"] / counts["flash_total_bytes"]
        assert full < FULL_MAX, "this test fills the log, which then gives back what is sure"
        states = ("writing", "visible", "retired", "quarantined")
        used = sum(counts[f"{state}_bytes"] for state in states)
        assert counts["free_bytes"] + used == counts["total_bytes"]
        assert counts["corrupt"] == counts["flash_corrupt"] == counts["bugs"] == 0

    async def check_sure(self, store: StoreClient, memory: SlotArray, seed: int) -> None:
        """A get waits for a busy disk only so long, and a tier whose disk hung steps aside for a
        while: what was late comes to a later one. What never comes is lost."""
        there: set[int] = set()
        with anyio.move_on_after(PATIENCE_S):
            while len(there) < BLOCKS:
                there |= await pull(store, memory, seed, BLOCKS)
                await anyio.sleep(0.05)
        if len(there) < BLOCKS:
            raise AssertionError(await self.diagnosis(store, seed, there))

    async def diagnosis(self, store: StoreClient, seed: int, there: set[int]) -> str:
        """Say all that tells a lost block from a slow one: where it is said to be, what the node
        counts, what failed here, what is on the disk, and what the node has said."""
        chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
        lines = [f"of {seed} only {sorted(there)} are there"]
        lines.append(f"lookup: {await store.lookup(chain, [(0, BLOCKS)], deadline_s=3)}")
        lines += [f"node: {await counts_of(store)}", f"here: {dict(store.counts)}"]
        lines.append(f"sure {self.sure}, doubtful {self.doubtful}, erased {self.erased[-20:]}")
        for path in sorted(self.folder.glob("*/segment-*")):
            data = path.read_bytes()
            held = [index for index, key in enumerate(chain.keys) if data.find(key) >= 0]
            named = f", which name {held}" if held else ""
            lines.append(f"{path.relative_to(self.folder)}: {len(data)} bytes{named}")
        assert self.process is not None
        return "\n".join([*lines, "its log:", *self.process.said.splitlines()[-40:]])

    async def work(self, store: StoreClient, memory: SlotArray, rng: random.Random) -> None:
        """Put, ask, read and erase, until the node dies."""
        while True:
            seed, self.next = self.next, self.next + 1
            self.doubtful.append(seed)
            await push(store, memory, seed, BLOCKS)
            chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
            await store.lookup(chain, [(0, BLOCKS)], deadline_s=1)
            if self.sure and rng.random() < 0.5:
                await pull(store, memory, rng.choice(self.sure), BLOCKS)
            # All of them: those that a death kept from being erased would fill the log in the end.
            while len(self.doubtful) > DOUBTFUL:
                await self.erase(store, self.doubtful[0])
            await anyio.sleep(PACE_S * rng.random())

    async def erase(self, store: StoreClient, seed: int) -> None:
        of = self.sure if seed in self.sure else self.doubtful
        of.remove(seed)
        self.doubtful.insert(0, seed)  # until it is done
        try:
            await store.drop(keys=chain_of(BLOCKS, seed=seed, layout=LAYOUT).keys, deadline_s=3)
        except Unavailable:
            return
        self.doubtful.remove(seed)
        self.erased.append(seed)

    async def settle(self, store: StoreClient, memory: SlotArray) -> None:
        """Put chains, and wait until they are on flash. On a busy machine memory gives up some
        before the disk has them: these are put again."""
        before = int((await counts_of(store))["flash_blocks"])
        fresh = range(self.next, self.next + CHAINS)
        self.next += CHAINS
        counts: dict[str, str | int] = {}
        with anyio.move_on_after(PATIENCE_S):
            while counts.get("flash_blocks") != before + CHAINS * BLOCKS:
                if not counts.get("flash_waiting_blocks"):
                    for seed in fresh:
                        await push(store, memory, seed, BLOCKS)
                        chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
                        await store.lookup(chain, [(0, BLOCKS)], deadline_s=3)
                await anyio.sleep(0.1)
                counts = await counts_of(store)
        if counts.get("flash_blocks") != before + CHAINS * BLOCKS:
            raise AssertionError(await self.diagnosis(store, fresh[0], set()))
        self.sure += fresh
        while len(self.sure) > KEPT:
            await self.erase(store, self.sure[0])


async def test_kills_at_random_moments_under_load(tmp_path: Path) -> None:
    rng, known = random.Random(7), Known(tmp_path)
    for number in range(KILLS + 1):
        with flash_node(tmp_path) as process:
            known.process = process
            async with client(process) as (store, memory):
                await known.check(store, memory)
                if number % 2 == 0:
                    await known.settle(store, memory)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(known.work, store, memory, rng)
                    await anyio.sleep(0.6 * rng.random())
                    process.process.send_signal(signal.SIGKILL)
                    process.process.wait()
                    tasks.cancel_scope.cancel()
        if "ERROR" in process.said:
            print(process.said)
        if number % 20 == 19:
            print(f"{number + 1} kills: {known.next} chains, {len(known.erased)} erased")
    assert known.sure and known.erased
