"""How near to its library's own speed is the bucket tier?

Blocks of the default model in fp8 are made into objects, a segment each, and put; then read again
segment by segment and block by block, each block checked in the caller's memory, as a store node
does. The references are obstore's plain put and get of the same bytes, with as many under way, in
the same run; rounds alternate. The server is a process of this machine (moto, which is written in
Python: it is the limit of both) unless `--bucket` names another one; only what was put is deleted.
Then a listing of many objects is taken in.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import anyio
import httpx
import msgspec
import numpy as np
import obstore
from obstore.store import S3Store

import rig
from kvass.common.block import BlockHeader, BlockLayout
from kvass.common.checksum import sums
from kvass.common.event_loop import run
from kvass.common.executor import ThreadExecutor
from kvass.common.keys import SEGMENT_BLOCKS, Chain, Namespace
from kvass.kvstore.flash.fetched import copy_all
from kvass.kvstore.node.tiers.bucket_tier import READS
from kvass.kvstore.node.tiers.uploads import UPLOADS
from kvass.kvstore.objects import contents
from kvass.kvstore.objects.names import name_of, root_of
from kvass.kvstore.objects.s3 import S3Bucket
from kvass.kvstore.objects.shelf import Listed, Shelf
from rig import Figure

LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_dtype="fp8")
SIZE = LAYOUT.block_size
ROOT = root_of("bench")
SEGMENTS, QUICK_SEGMENTS = 64, 16
ROUNDS, QUICK_ROUNDS = 5, 2
LISTED = 20_000
NAME = "kvass-bench"
START_S = 30.0

Segment = tuple[list[BlockHeader], list[memoryview]]


@contextmanager
def server() -> Iterator[str]:
    """Run an S3 server with one bucket; yields the bucket's address, to which the environment
    leads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    os.environ |= {
        "AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench",
    }  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            ends_s = time.monotonic() + START_S
            while True:
                try:
                    httpx.put(f"{address}/{NAME}").raise_for_status()
                    break
                except httpx.TransportError:
                    if time.monotonic() > ends_s:
                        raise
                    time.sleep(0.05)
            yield f"s3://{NAME}"
        finally:
            process.kill()


def segments_of(count: int) -> list[Segment]:
    """Return chains of one segment each."""
    data = np.random.default_rng(1).integers(0, 256, (SEGMENT_BLOCKS, SIZE), dtype=np.uint8)
    found: list[Segment] = []
    for number in range(count):
        chain = Chain(Namespace(b"n" * 32), LAYOUT.block_tokens)
        tokens = random.Random(number).choices(range(50_000), k=SEGMENT_BLOCKS * 16)
        chain.extend(tokens)
        headers = [header_of(chain, index, data[index].data) for index in range(SEGMENT_BLOCKS)]
        found.append((headers, [row.data for row in data]))
    return found


def header_of(chain: Chain, index: int, payload: memoryview) -> BlockHeader:
    return BlockHeader(
        key=chain.keys[index],
        parent=chain.parent(index),
        segment_key=chain.segment_key(index),
        index=index,
        namespace=b"n" * 32,
        tenant="",
        writer="bench",
        token_count=LAYOUT.block_tokens,
        length=SIZE,
        checksums=sums(payload, 0, SIZE, 1),
    )


async def mb_s(works: Sequence[Callable[[], Awaitable[int]]], at_once: int) -> float:
    """Do these, so many at once; returns megabytes of blocks a second."""
    limit, moved = anyio.CapacityLimiter(at_once), 0

    async def one(work: Callable[[], Awaitable[int]]) -> None:
        nonlocal moved
        async with limit:
            moved += await work()

    started_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for work in works:
            tasks.start_soon(one, work)
    return moved / (time.perf_counter() - started_s) / 1e6


class Bench:
    """The tier's own steps beside the library's. Mutable fields: `shelf`, `rates`, `target` (where
    blocks are read to)."""

    def __init__(self, address: str, segments: list[Segment], threads: ThreadExecutor) -> None:
        self.objects = S3Bucket(address)
        self.plain: S3Store = self.objects.store
        self.segments = segments
        self.threads = threads
        self.shelf = Shelf(ROOT)
        self.rates: dict[str, list[float]] = {}
        self.target = np.ones((READS, SEGMENT_BLOCKS, SIZE), dtype=np.uint8)
        self.names = [name_of(headers).text(ROOT) for headers, _ in segments]

    async def round(self) -> None:
        raw = [contents.packed("raw", *each) for each in self.segments]
        steps: dict[str, tuple[list[Callable[[], Awaitable[int]]], int]] = {
            "raw put": ([self._raw_put(n, data) for n, data in enumerate(raw)], UPLOADS),
            "put": ([self._put(n) for n in range(len(raw))], UPLOADS),
            "raw get": ([self._raw_get(n) for n in range(len(raw))], READS),
            "get": ([self._get(n, range(SEGMENT_BLOCKS)) for n in range(len(raw))], READS),
            "raw range": ([self._raw_range(n) for n in range(len(raw))], READS),
            "range": ([self._get(n, range(7, 8)) for n in range(len(raw))], READS),
        }
        for name, (works, at_once) in steps.items():
            self.rates.setdefault(name, []).append(await mb_s(works, at_once))

    async def delete(self) -> None:
        await self.objects.delete([*self.names, *map(self._raw_name, range(len(self.names)))])

    def _raw_name(self, number: int) -> str:
        return f"{ROOT}/raw/{number}"

    def _raw_put(self, number: int, data: memoryview) -> Callable[[], Awaitable[int]]:
        async def work() -> int:
            await obstore.put_async(self.plain, self._raw_name(number), data, use_multipart=False)
            return SIZE * SEGMENT_BLOCKS

        return work

    def _put(self, number: int) -> Callable[[], Awaitable[int]]:
        headers, payloads = self.segments[number]
        name = self.names[number]

        async def work() -> int:
            data = await self.threads.run(lambda: contents.packed(name, headers, payloads))
            await self.objects.put(name, data)
            self.shelf.add([Listed(name, len(data), 0.0)], 0.0)
            return SIZE * len(headers)

        return work

    def _raw_get(self, number: int) -> Callable[[], Awaitable[int]]:
        async def work() -> int:
            found = await obstore.get_async(self.plain, self._raw_name(number))
            assert len(await found.bytes_async()) >= SIZE * SEGMENT_BLOCKS
            return SIZE * SEGMENT_BLOCKS

        return work

    def _raw_range(self, number: int) -> Callable[[], Awaitable[int]]:
        async def work() -> int:
            name = self._raw_name(number)
            assert await obstore.get_range_async(self.plain, name, start=SIZE, length=SIZE)
            return SIZE

        return work

    def _get(self, number: int, blocks: range) -> Callable[[], Awaitable[int]]:
        headers, _ = self.segments[number]

        async def work() -> int:
            found = self.shelf.find([headers[block].key for block in blocks])
            places = [self.shelf.where(place) for place in found]
            ranges = [(where[1], where[2]) for where in places if where is not None]
            read = await self.objects.read(self.names[number], ranges)
            assert read is not None and len(read) == len(blocks)
            for block, data, (start, _) in zip(blocks, read, ranges, strict=True):
                fetched = contents.read(self.names[number], data, start)
                assert fetched is not None and fetched.header == headers[block]
                address = self.target[number % READS, block].ctypes.data
                assert await self.threads.run(partial(copy_all, [fetched], [address])) == [True]
            return SIZE * len(blocks)

        return work


async def speed(address: str, count: int, rounds: int) -> list[Figure]:
    threads = ThreadExecutor("copy", 2)
    bench = Bench(address, segments_of(count), threads)
    try:
        for _ in range(rounds):
            await bench.round()
    finally:
        await bench.delete()
        threads.close()
    rates = {name: statistics.median(values) for name, values in bench.rates.items()}
    return [
        Figure("put, a segment an object", rates["put"], "MB/s",
               f"obstore's put, {UPLOADS} at once", rates["raw put"]),
        Figure("get of segments, checked", rates["get"], "MB/s",
               f"obstore's get, {READS} at once", rates["raw get"]),
        Figure("get of single blocks, checked", rates["range"], "MB/s",
               f"obstore's get_range, {READS} at once", rates["raw range"]),
    ]  # fmt: skip


def listing_figures(count: int) -> list[Figure]:
    """Take in a listing, as a start does."""
    (headers, _), *_ = segments_of(1)
    pages: list[list[Listed]] = []
    for number in range(count):
        keys = [random.Random(f"{number} {block}").randbytes(32) for block in range(SEGMENT_BLOCKS)]
        named = [
            msgspec.structs.replace(header, key=key)
            for header, key in zip(headers, keys, strict=True)
        ]
        size = contents.stride_of(headers) * len(headers)
        if not number % 100:
            pages.append([])
        pages[-1].append(Listed(name_of(named).text(ROOT), size, 1.0))
    shelf = Shelf(ROOT)
    longest_s, started_s = 0.0, time.perf_counter()
    for page in pages:
        begun_s = time.perf_counter()
        shelf.add(page, 0.0)
        longest_s = max(longest_s, time.perf_counter() - begun_s)
    taken_s = time.perf_counter() - started_s
    return [
        Figure("blocks of a listing taken in", shelf.blocks / taken_s / 1e3, "thousand/s"),
        Figure("longest page of 100 objects", longest_s * 1e3, "ms"),
    ]


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--bucket", help="s3://bucket/prefix of the server in the environment")
    given = parser.parse_args()
    count, rounds = (QUICK_SEGMENTS, QUICK_ROUNDS) if given.quick else (SEGMENTS, ROUNDS)
    if given.bucket:
        made = run(speed, given.bucket, count, rounds)
    else:
        with server() as address:
            made = run(speed, address, count, rounds)
    made += listing_figures(LISTED)
    rig.report(f"bucket tier, blocks of {SIZE:,} bytes, medians", made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
