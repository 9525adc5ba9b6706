"""A store node with a bucket, as a process, against an S3 server: killed, started anew, erased."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import obstore
import pytest

from bucket_server import NAME, SECRET, BucketServer, bucket_server
from kvass.common.errors import Unavailable
from kvass.kvstore.client.store import StoreClient
from kvass.kvstore.objects.s3 import S3Bucket
from store_alone import NodeProcess, node
from store_peer import LAYOUT, pull, push, worker
from store_rest import at_rest, counts_of, until
from store_sim import SlotArray, chain_of

pytestmark = [pytest.mark.anyio, pytest.mark.process]
BLOCKS = 16
CHAINS = 5  # of a slab of 109 blocks: more than half of it
ALL = set(range(BLOCKS))


@pytest.fixture(scope="module")
def server() -> Iterator[BucketServer]:
    with bucket_server() as found:
        yield found


@contextmanager
def bucket_node(server: BucketServer, prefix: str) -> Iterator[NodeProcess]:
    with node(
        "--standalone", "--id", "store-0", "--slab-bytes", "20MiB",
        "--set", f"store.bucket=s3://{NAME}/{prefix}", **server.environment,
    ) as found:  # fmt: skip
        yield found


@asynccontextmanager
async def client(process: NodeProcess) -> AsyncIterator[tuple[StoreClient, SlotArray]]:
    async with worker("local", process.address, BLOCKS, "self") as opened:
        yield opened


async def fill(store: StoreClient, memory: SlotArray) -> None:
    """Put chains and ask for each; they go to the bucket."""
    for seed in range(CHAINS):
        assert await push(store, memory, seed, BLOCKS) == ALL
        chain = chain_of(BLOCKS, seed=seed, layout=LAYOUT)
        assert await store.lookup(chain, [(0, BLOCKS)], deadline_s=3) == [(0, BLOCKS)]
    await has(store, "bucket_blocks", CHAINS * BLOCKS)


async def has(store: StoreClient, name: str, count: int) -> None:
    async def there() -> bool:
        return (await counts_of(store))[name] == count

    await until(there)


async def whole(store: StoreClient, memory: SlotArray, seed: int) -> None:
    """A get waits for a busy bucket only so long: what was late comes to the next one. `pull`
    asserts that every byte is right."""
    there: set[int] = set()

    async def all_there() -> bool:
        there.update(await pull(store, memory, seed, BLOCKS))
        return there == ALL

    await until(all_there)


async def test_what_the_bucket_has_outlives_the_node_until_it_is_dropped(
    server: BucketServer,
) -> None:
    with bucket_node(server, "first/life") as first:
        async with client(first) as (store, memory):
            await fill(store, memory)
            first.process.send_signal(signal.SIGKILL)
    names = server.names()
    assert len(names) == CHAINS and all(n.startswith("first/life/kvass1-local/") for n in names)
    with bucket_node(server, "first/life") as second:
        async with client(second) as (store, memory):
            await has(store, "bucket_blocks", CHAINS * BLOCKS)
            for seed in range(CHAINS):
                await whole(store, memory, seed)
            counts = await at_rest(store)
            assert counts["bucket_risen"] == CHAINS * BLOCKS and counts["bucket_corrupt"] == 0
            assert await store.drop(tenant="") == CHAINS * BLOCKS
            assert await pull(store, memory, 1, BLOCKS) == set()
        assert SECRET not in first.said + second.said
    assert server.names() == []
    with bucket_node(server, "first/life") as third:
        async with client(third) as (store, memory):
            third.until("bucket: 0 blocks in 0 objects")
            for seed in range(CHAINS):
                assert await pull(store, memory, seed, BLOCKS) == set()


async def test_without_its_bucket_a_node_goes_on_and_says_so_once(server: BucketServer) -> None:
    with bucket_node(server, "second") as process:
        async with client(process) as (store, memory):
            await fill(store, memory)
            server.kill()
            try:
                chain = chain_of(BLOCKS, seed=7, layout=LAYOUT)
                assert await push(store, memory, 7, BLOCKS) == ALL
                assert await pull(store, memory, 7, BLOCKS) == ALL
                for seed in range(CHAINS + 2):  # evicted by then, and not to be had
                    await push(store, memory, 20 + seed, BLOCKS)

                async def is_off() -> bool:
                    there = await pull(store, memory, 1, BLOCKS)
                    assert there in (set(), ALL)
                    return bool((await counts_of(store))["bucket_off"])

                await until(is_off)
                with pytest.raises(Unavailable, match=r"bucket: .*the node tries again"):
                    await store.drop(keys=chain.keys)
                process.until("bucket: cannot .*: the node goes on without the bucket")
            finally:
                server.start()

            async def is_back() -> bool:
                counts = await counts_of(store)
                return not counts["bucket_off"] and not counts["bucket_unerased"]

            await until(is_back)
            process.until("bucket: it answers again")
            assert (await counts_of(store))["bucket_blocks"] == 0, "the server had no disk"
        assert process.said.count("goes on without the bucket") == 1


async def test_a_bucket_that_is_not_there_is_said_and_memory_serves(server: BucketServer) -> None:
    with node(
        "--standalone",
        "--set",
        "store.bucket=s3://no-such-bucket",
        **server.environment,
    ) as process:
        async with client(process) as (store, memory):
            process.until(r"bucket: cannot list: .*NoSuchBucket.*: the node goes on without")
            await push(store, memory, 1, BLOCKS)
            assert await pull(store, memory, 1, BLOCKS) == ALL
            assert (await counts_of(store))["bucket_off"] == 1


async def test_the_seam_against_a_server(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    objects = S3Bucket(f"s3://{NAME}/third")
    data = bytes(range(256)) * 64
    names = [f"a/{'x' * 200}-{n}/b_{n}" for n in range(120)]
    for name in names:
        await objects.put(name, memoryview(data))
    obstore.put(server.store(), "thirdly/a/no", b"of somebody else")
    found = [each async for page in objects.pages("a") for each in page]
    assert sorted(each.name for each in found) == sorted(names)
    assert {each.size_bytes for each in found} == {len(data)}
    assert all(-5 < each.age_s < 60 for each in found)
    parts = await objects.read(names[0], [(0, 4), (4, 8), (300, 400)]) or []
    assert [bytes(part) for part in parts] == [data[:4], data[4:8], data[300:400]]
    assert await objects.read("a/none", [(0, 4)]) is None
    (short,) = await objects.read(names[0], [(len(data) - 3, len(data) + 5)]) or []
    assert short == data[-3:]
    await objects.delete([*names, "a/none"])
    assert [page async for page in objects.pages("a")] == []
    assert server.names() == ["thirdly/a/no"]


async def test_what_a_server_refuses_is_said_without_secrets(
    server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    objects = S3Bucket("s3://no-such-bucket/x")
    with pytest.raises(Unavailable, match=r"^bucket: cannot put: .*NoSuchBucket"):
        await objects.put("name", memoryview(b"data"))
    server.process.send_signal(signal.SIGSTOP)
    try:
        monkeypatch.setattr("kvass.kvstore.objects.s3.READ_S", 0.3)
        with pytest.raises(Unavailable, match="cannot read: no answer within"):
            with anyio.fail_after(5):
                await objects.read("name", [(0, 1)])
    finally:
        server.process.send_signal(signal.SIGCONT)
