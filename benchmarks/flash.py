"""How near to the disk's own speed is the flash tier, and what does it keep in memory?

Blocks of the default model in fp8 are appended to a log, synced, and brought up again in random
order as a node does it, each one checked in memory of the caller's own. The references are `fio` in
the same folder and the same run, past the page cache, into new files, with the same sizes and as
much in flight; rounds alternate. Then another process reads what only the flash of a node has; a
log of many small records is opened anew; and the table of all keys is filled with as many as a
large node has. `--compression` measures something else: `rig_compression.py`.
"""

from __future__ import annotations

import gc
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

import rig
from kvass.common import event_loop
from kvass.common.block import BlockHeader, BlockLayout
from kvass.common.checksum import sums
from kvass.common.config import Config
from kvass.common.executor import ThreadExecutor
from kvass.common.keys import Chain
from kvass.common.pages import shared_pages
from kvass.common.pool.memory import SlotMemory
from kvass.kvstore.flash import records, table
from kvass.kvstore.flash.appender import BUFFER_BYTES
from kvass.kvstore.flash.appender import DEPTH as WRITES
from kvass.kvstore.flash.disk import PAGE, RealDisk
from kvass.kvstore.flash.fetched import copy_all
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.settings import LogSettings
from kvass.kvstore.flash.table import Table
from kvass.kvstore.node.service import COPY_THREADS, GC_THRESHOLDS, open_node
from kvass.kvstore.node.tiers.flash_source import FLASH_READS, FlashSource
from kvass.kvstore.node.tiers.rises import FLIGHT_BYTES, PART_BYTES
from rig import Figure
from store import put_s
from transfer import BLOCKS, a_client, chains, config_of, get_s, hello_of, process

LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_dtype="fp8")
SEGMENT_BYTES = 64 << 20
BATCH = 64  # blocks of one append
ROUNDS, QUICK_ROUNDS = 5, 2
SIZE_BYTES, QUICK_SIZE_BYTES = 1 << 30, 256 << 20
CHAINS, QUICK_CHAINS, TURNS = 40, 10, 4  # of a node: chains of BLOCKS blocks, and how often each
RECORDS = 100_000
KEYS = 10_000_000


def header_of(number: int, payload: memoryview, size: int) -> BlockHeader:
    return BlockHeader(
        key=_name(number),
        parent=_name(number - 1) if number else bytes(32),
        segment_key=bytes(32),
        index=number,
        namespace=b"n" * 32,
        tenant="",
        writer="bench",
        token_count=LAYOUT.block_tokens,
        length=size,
        checksums=sums(payload, 0, size, 1),
    )


def _name(number: int) -> bytes:
    return random.Random(number).randbytes(32)


@contextmanager
def opened(folder: Path, size: int, segment: int = SEGMENT_BYTES) -> Iterator[FlashLog]:
    settings = LogSettings(max(size * 2, 3 * segment), segment, 256 << 20)
    with ThreadPoolExecutor(WRITES) as threads:
        log = FlashLog(RealDisk(folder), settings, threads)
        yield log
        log.close()


def fio_gb_s(folder: Path, size: int, *arguments: str) -> float:
    """Return what fio gives. Its file stays for the next round, so that its blocks are there."""
    command = [
        "fio", "--name=kvass", f"--filename={folder / 'fio.data'}", f"--size={size}",
        "--direct=1", "--ioengine=libaio", "--output-format=json", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return sum(float(job[way]["bw_bytes"]) for way in ("read", "write")) / 1e9


def write_gb_s(log: FlashLog, blocks: list[tuple[BlockHeader, memoryview]]) -> float:
    started_s = time.perf_counter()
    for first in range(0, len(blocks), BATCH):
        log.append(blocks[first : first + BATCH])
    log.sync()
    return len(blocks) * LAYOUT.block_size / (time.perf_counter() - started_s) / 1e9


def read_gb_s(log: FlashLog, keys: list[bytes]) -> float:
    """Bring all keys up as a node does, part after part, into memory of the caller's own instead of
    slots; every block must come."""
    places = log.catalog.find(keys)
    part_blocks = -(-PART_BYTES // (table.pages_in(places[0]) * PAGE))
    starts = iter(range(0, len(keys), part_blocks))
    target = np.ones((FLIGHT_BYTES // PART_BYTES, part_blocks, LAYOUT.block_size), dtype=np.uint8)
    readers, copiers = ThreadExecutor("read", FLASH_READS), ThreadExecutor("copy", COPY_THREADS)
    source = FlashSource(log.catalog, readers)
    right: list[bool] = []

    async def lift(slots: NDArray[np.uint8]) -> None:
        addresses = [slot.ctypes.data for slot in slots]
        for start in starts:
            stop = start + part_blocks
            part = dict(zip(keys[start:stop], places[start:stop], strict=True))
            async with source.fetched(part) as fetched:
                blocks = list(fetched.values())
                copy = partial(copy_all, blocks, addresses[: len(blocks)])
                right.extend(await copiers.run(copy))

    async def lift_all() -> float:
        started_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for slots in target:
                tasks.start_soon(lift, slots)
        return time.perf_counter() - started_s

    taken_s = event_loop.run(lift_all)
    readers.close()
    copiers.close()
    assert right == [True] * len(keys), f"{sum(right)} of {len(keys)} blocks came"
    return len(keys) * LAYOUT.block_size / taken_s / 1e9


def speed_figures(folder: Path, size: int, rounds: int) -> list[Figure]:
    count = size // (LAYOUT.block_size + PAGE)
    data = np.random.default_rng(1).integers(0, 256, (count, LAYOUT.block_size), dtype=np.uint8)
    record = records.pages_of(LAYOUT.block_size + 512) * PAGE
    blocks = [(header_of(n, data[n].data, LAYOUT.block_size), data[n].data) for n in range(count)]
    keys = [header.key for header, _ in blocks]
    rates: dict[str, list[float]] = {"write": [], "fio write": [], "read": [], "fio read": []}
    chance = random.Random(2)
    for number in range(rounds):
        (folder / "fio.data").unlink(missing_ok=True)  # the log's files are new, too
        way = (f"--bs={BUFFER_BYTES}", f"--iodepth={WRITES}", "--rw=write", "--end_fsync=1")
        rates["fio write"].append(fio_gb_s(folder, size, *way, "--fallocate=posix"))
        with opened(folder / f"log-{number}", size) as log:
            rates["write"].append(write_gb_s(log, blocks))
            chance.shuffle(keys)
            rates["read"].append(read_gb_s(log, keys))
        shutil.rmtree(folder / f"log-{number}")
        way = (f"--bs={record}", f"--iodepth={FLASH_READS}", "--rw=randread", "--norandommap")
        rates["fio read"].append(fio_gb_s(folder, size, *way))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return [
        Figure("append and sync", middle["write"], "GB/s",
               f"fio, {BUFFER_BYTES >> 20} MiB, depth {WRITES}", middle["fio write"],
               least_ratio=0.7),
        Figure("random reads, checked", middle["read"], "GB/s",
               f"fio, {record} bytes, depth {FLASH_READS}", middle["fio read"], least_ratio=0.8),
    ]  # fmt: skip


def run_flash_node(pipe: Connection, config: Config) -> None:
    """A store node with flash, alone in its cluster, until it is killed."""
    gc.set_threshold(*GC_THRESHOLDS)

    async def serve() -> None:
        async with open_node(config, hello_of("store")) as (node, address):
            node.set_nodes([])  # there is nobody to say what was erased meanwhile
            pipe.send(address)
            await anyio.sleep_forever()

    event_loop.run(serve)


async def served_gb_s(address: str, names: list[Chain], turns: int) -> list[float]:
    """Put chains whose blocks are twice what the node's memory holds, then get them in turn; return
    the rates of those gets whose blocks all came from flash."""
    memory = SlotMemory(LAYOUT, BLOCKS, shared_pages)
    rates: list[float] = []
    async with a_client("local", address, memory, LAYOUT) as store:

        async def count(name: str) -> int:
            return int((await store.stats())[0][name])

        for number, chain in enumerate(names):
            memory.array[:] = number
            await put_s(store, chain, 0)
            await get_s(store, chain, 0)  # asked for: now its blocks are worth a place on flash
            for _ in range(1000):
                if await count("flash_blocks") >= (number + 1) * BLOCKS:
                    break
                await anyio.sleep(0.01)
        for _ in range(turns):
            for number, chain in enumerate(names):
                before = await count("flash_risen")
                taken_s = await get_s(store, chain, 0)
                assert (memory.array == number).all()
                if await count("flash_risen") == before + BLOCKS:
                    rates.append(BLOCKS * LAYOUT.block_size / taken_s / 1e9)
    return rates


def served_figures(folder: Path, chain_count: int, fio: float | None) -> list[Figure]:
    """What a reader in another process gets out of a node's flash, block by block checked."""
    config = config_of("local", chain_count * BLOCKS * LAYOUT.block_size // 2)
    flash_bytes = 4 * config.store.slab_bytes
    store = replace(config.store, flash_dir=str(folder), flash_bytes=flash_bytes)
    with process(run_flash_node, replace(config, store=store)) as address:
        rates = event_loop.run(served_gb_s, address, chains(chain_count), TURNS)
    return [
        Figure(f"get of {BLOCKS} blocks from a node's flash", statistics.median(rates), "GB/s",
               "fio's reads, as above", fio)
    ]  # fmt: skip


def rebuild_figures(folder: Path, count: int) -> list[Figure]:
    """Open a log of many one-page records anew, by the indexes of its files."""
    payload = memoryview(bytes(1024))
    size = count * 2 * PAGE
    with opened(folder, size, 16 << 20) as log:
        for first in range(0, count, 1000):
            log.append(
                (header_of(number, payload, len(payload)), payload)
                for number in range(first, min(first + 1000, count))
            )
    started_s = time.perf_counter()
    with opened(folder, size, 16 << 20) as log:
        taken_s = time.perf_counter() - started_s
        assert len(log.catalog) == count
    rate = count / taken_s / 1e3
    return [
        Figure(f"index rebuilt, {count:,} records", rate, "thousand/s", "the target", 200.0,
               least_ratio=1.0)
    ]  # fmt: skip


def index_figures(count: int) -> list[Figure]:
    """Fill the table with as many keys as a large node has."""
    keys, chance = Table(), np.random.default_rng(3)
    place = np.uint64(table.place_of(1, 1, 1))
    for first in range(0, count, 1 << 20):
        hashes = chance.integers(2, 1 << 63, min(1 << 20, count - first), dtype=np.uint64)
        keys.put(hashes, np.full(len(hashes), place))
    asked = hashes[:256]
    started_s = time.perf_counter()
    for _ in range(100):
        keys.find(asked)
    find_us = (time.perf_counter() - started_s) / 100 * 1e6
    return [
        Figure("table of keys", keys.size_bytes / count, "bytes/block"),
        Figure(f"table of {count:,} blocks", keys.size_bytes / 2**30, "GiB", limit=2.0),
        Figure("find 256 keys in it", find_us, "µs"),
    ]


def compression(quick: bool) -> list[Figure]:
    # Late, because it loads torch and a model, which nothing else here needs.
    from rig_compression import figures

    return figures(quick)


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--compression", action="store_true", help="only: would zstd pay?")
    given = parser.parse_args()
    if given.compression:
        rig.report("zstd on KV of the default model", compression(given.quick), given.json)
        return 0
    if shutil.which("fio") is None:
        print("flash.py compares with fio, which is not here: apt-get install fio", file=sys.stderr)
        return 2
    size = QUICK_SIZE_BYTES if given.quick else SIZE_BYTES
    made: list[Figure] = []
    chain_count = QUICK_CHAINS if given.quick else CHAINS
    parts: list[Callable[[Path], list[Figure]]] = [
        lambda folder: speed_figures(folder, size, QUICK_ROUNDS if given.quick else ROUNDS),
        lambda folder: served_figures(folder, chain_count, made[1].reference_value),
        lambda folder: rebuild_figures(folder / "small", RECORDS),
        lambda folder: index_figures(KEYS),
    ]
    for part in parts:
        with tempfile.TemporaryDirectory(dir=given.folder, prefix="kvass-flash-") as folder:
            made += part(Path(folder))
    rig.report(f"flash tier, blocks of {LAYOUT.block_size:,} bytes, medians", made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
