"""Other processes for the store's tests: a node, or a worker that pushes and pulls as it is
told."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import anyio

from kvass.common import event_loop
from kvass.common.block import BlockLayout
from kvass.common.config import ClusterConfig, Config, StoreConfig, TransportConfig
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.hello import Hello
from kvass.common.transport.identity import own_identity
from kvass.common.transport.route import Setting
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.node.service import open_node
from kvass.kvstore.placement import StoreNode
from store_sim import SlotArray, chain_of

# 192,000 bytes a block, about what the default model's fp8 blocks have.
LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_dtype="fp8")
ANSWER_S = 30.0
STORMS = {"storm": 3.0, "patient storm": 10.0}  # seconds of a put


def config_of(setting: Setting, *, slab_blocks: int = 256) -> Config:
    return Config(
        transport=TransportConfig(kind=setting, landing_bytes=16 << 20),
        store=StoreConfig(slab_bytes=slab_blocks * LAYOUT.block_size),
    )


def hello_of(role: str, name: str) -> Hello:
    who = own_identity()
    return Hello(role, name, who.host_id, who.start_id, who.pid, {})


class Process:
    """A spawned process and the pipe to it."""

    def __init__(self, target: Any, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    async def answer(self) -> Any:
        """Wait for what it says next."""
        with anyio.fail_after(ANSWER_S):
            while not self.pipe.poll():  # noqa: ASYNC110 (a pipe tells no loop)
                await anyio.sleep(0.002)
        return self.pipe.recv()

    async def ask(self, *command: object) -> Any:
        self.pipe.send(command)
        return await self.answer()

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill(signal.SIGKILL)
        self.process.join(5)
        self.pipe.close()


def run_node(pipe: Connection, config: Config) -> None:
    async def main() -> None:
        async with open_node(config, hello_of("store", "store-0")) as (_, address):
            pipe.send(address)
            await anyio.sleep_forever()

    event_loop.run(main)


def run_worker(pipe: Connection, setting: Setting, address: str, blocks: int) -> None:
    """Serve push and pull of chains by seed; `storm` and `patient storm` push one and drop it until
    the end, by puts that have as long as `STORMS` says."""

    async def main() -> None:
        async with worker(setting, address, blocks, "other") as (store, memory):
            pipe.send("ready")
            while True:
                while not pipe.poll():  # noqa: ASYNC110 (a pipe tells no loop)
                    await anyio.sleep(0.002)
                verb, seed = pipe.recv()
                if verb == "push":
                    pipe.send(sorted(await push(store, memory, seed, blocks)))
                elif verb == "pull":
                    pipe.send(sorted(await pull(store, memory, seed, blocks)))
                else:
                    fill(memory, seed, blocks)
                    pipe.send("storming")
                    while True:
                        await push(
                            store, memory, seed, blocks, filled=True, deadline_s=STORMS[verb]
                        )
                        await store.drop(keys=chain_of(blocks, seed=seed, layout=LAYOUT).keys)

    event_loop.run(main)


@asynccontextmanager
async def worker(
    setting: Setting, address: str, blocks: int, name: str
) -> AsyncIterator[tuple[StoreClient, SlotArray]]:
    """Open a client with memory in this process."""
    memory = SlotArray(LAYOUT, blocks)
    config = TransportConfig(kind=setting, landing_bytes=16 << 20)
    hello, credentials = hello_of("prefill", name), credentials_of(ClusterConfig())
    async with open_client(config, hello, credentials, memory=memory, layout=LAYOUT) as store:
        store.set_nodes([StoreNode("store-0", address, 1 << 30)])
        yield store, memory


def fill(memory: SlotArray, seed: int, blocks: int) -> None:
    for slot, key in enumerate(chain_of(blocks, seed=seed, layout=LAYOUT).keys):
        memory.fill(slot, key)


async def push(
    store: StoreClient,
    memory: SlotArray,
    seed: int,
    blocks: int,
    *,
    filled: bool = False,
    deadline_s: float = 3.0,
) -> set[int]:
    if not filled:
        fill(memory, seed, blocks)
    chain = chain_of(blocks, seed=seed, layout=LAYOUT)
    every = range(blocks)
    result = await store.push(
        chain, every, every, hold_owner=None, tenant="", deadline_s=deadline_s
    )
    return result.stored


async def pull(store: StoreClient, memory: SlotArray, seed: int, blocks: int) -> set[int]:
    """Pull a chain; assert that what is said to be there is right."""
    memory.array[:blocks] = 0xEE
    chain = chain_of(blocks, seed=seed, layout=LAYOUT)
    there = await store.pull(chain, range(blocks), range(blocks), deadline_s=3.0)
    for index in there:
        assert memory.is_right(index, chain.keys[index]), f"wrong bytes for block {index}"
    return there


@contextlib.contextmanager
def started(target: Any, *arguments: object) -> Iterator[Process]:
    process = Process(target, *arguments)
    try:
        yield process
    finally:
        process.end()
