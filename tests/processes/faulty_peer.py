"""Processes for the store's tests that do one thing wrong: lie about bytes, take them late, stop in
mid-read, come back at an old address.

Each is a target for `store_peer.started`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar
from unittest import mock

import anyio
import numpy as np

from kvass.common import event_loop
from kvass.common.checksum import Sums, sum_ranges
from kvass.common.config import Config, TransportConfig
from kvass.common.executor import ThreadExecutor
from kvass.common.rpc.server import listen
from kvass.common.transport import local, nixl
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.identity import Identity
from kvass.common.transport.peer_process import PeerProcess, Reading
from kvass.common.transport.route import Setting
from kvass.common.transport.seam import Copies, EndpointCard, Region, Transport
from kvass.kvstore.node import service
from store_peer import hello_of, pull, worker

Lie = Literal["", "nothing", "half", "zeros"]
LIES: tuple[Lie, ...] = ("nothing", "half", "zeros")
TAIL = 4096  # bytes that a transfer leaves out at a block's end
T = TypeVar("T")


@dataclass
class Lying:
    """A transport that reports success, whatever it moved. Mutable: `lie`, and `told`, how often.

    A write must move something: its arrival is what its target waits for.
    """

    inner: Transport
    lie: Lie = ""
    told: int = 0

    def __post_init__(self) -> None:
        self.kind = self.inner.kind

    def card(self) -> EndpointCard:
        return self.inner.card()

    async def attach(self, card: EndpointCard) -> None:
        await self.inner.attach(card)

    def detach(self, start_id: str) -> None:
        self.inner.detach(start_id)

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        kept = self._kept(copies)
        if kept.sizes.any():
            await self.inner.read(start_id, kept, deadline_s=deadline_s)
        ends = copies.local + copies.sizes
        if self.lie == "zeros":
            for end in ends:
                ctypes.memset(int(end) - TAIL, 0, TAIL)
        if sums is not None:  # of what is there, whatever came
            size = int(copies.sizes[0]) // sums.groups
            sums.values[:] = sum_ranges(copies.local.tolist(), size, sums.groups)
            sums.whole[:] = True

    async def write(self, start_id: str, copies: Copies, *, tag: bytes, deadline_s: float) -> None:
        kept = self._kept(copies)
        sizes = np.maximum(kept.sizes, np.uint64(1))
        moved = Copies(kept.local, kept.remote, sizes)
        await self.inner.write(start_id, moved, tag=tag, deadline_s=deadline_s)

    def _kept(self, copies: Copies) -> Copies:
        sizes = copies.sizes
        self.told += bool(self.lie)
        if self.lie == "nothing":
            sizes = np.zeros_like(sizes)
        elif self.lie == "half":
            sizes = sizes // np.uint64(2)
        elif self.lie == "zeros":
            sizes = sizes - np.uint64(TAIL)
        return Copies(copies.local, copies.remote, sizes)


@contextmanager
def lying_transports(module: Any) -> Iterator[list[Lying]]:
    """Make what `module` opens lie when it is told to; yields the transports as they are opened."""
    opened: list[Lying] = []

    async def open_lying(
        config: TransportConfig, identity: Identity, regions: list[Region]
    ) -> Endpoints:
        endpoints = await nixl_open(config, identity, regions)
        opened.append(Lying(endpoints.writer))
        endpoints.writer = opened[-1]
        if endpoints.reader is not None:
            opened.append(Lying(endpoints.reader))
            endpoints.reader = opened[-1]
        return endpoints

    nixl_open = nixl.open_endpoints
    with mock.patch.object(module, "open_endpoints", open_lying):
        yield opened


def run_lying_node(pipe: Connection, config: Config) -> None:
    """A store node that lies as it was last told to; it answers how often it has."""

    async def main() -> None:
        with lying_transports(service) as transports:
            async with service.open_node(config, hello_of("store", "store-0")) as (_, address):
                pipe.send(address)
                while True:
                    (lie,) = await asyncio.to_thread(pipe.recv)
                    told = sum(each.told for each in transports)
                    for each in transports:
                        each.lie, each.told = lie, 0
                    pipe.send(told)

    event_loop.run(main)


@contextmanager
def late_threads(pause: Callable[[], None]) -> Iterator[None]:
    """Let this process's threads pause before they copy: one that reads, and each that runs an
    executor's work. All reads are a thread's: in the event loop none could be late."""
    read, run = PeerProcess.read, ThreadExecutor.run

    def late_read(self: PeerProcess, reading: Reading, first: int, stop: int) -> None:
        if not first:
            pause()
        read(self, reading, first, stop)

    async def late_run(self: ThreadExecutor, function: Callable[[], T]) -> T:
        def late() -> T:
            pause()
            return function()

        return await run(self, late)

    with (
        mock.patch.object(local, "LOOP_BYTES", 0),
        mock.patch.object(PeerProcess, "read", late_read),
        mock.patch.object(ThreadExecutor, "run", late_run),
    ):
        yield


def run_late_node(pipe: Connection, config: Config) -> None:
    """A store node with a slow thread: told a time, the next one that is about to take a writer's
    bytes says so, and takes them only after that time; others go on meanwhile."""
    pauses = queue.SimpleQueue[float]()

    def pause() -> None:
        if not pauses.empty():
            pause_s = pauses.get()
            pipe.send("taking")
            time.sleep(pause_s)

    async def main() -> None:
        async with service.open_node(config, hello_of("store", "store-0")) as (_, address):
            pipe.send(address)
            while True:
                pauses.put(await asyncio.to_thread(pipe.recv))

    with late_threads(pause):
        event_loop.run(main)


def run_node_at(pipe: Connection, config: Config, port: int) -> None:
    """A store node at a port that is named: where another one was before."""

    async def listen_there(host: str, _port: int) -> tuple[Any, str]:
        return await listen(host, port)

    async def main() -> None:
        with mock.patch.object(service, "listen", listen_there):
            async with service.open_node(config, hello_of("store", "store-0")) as (_, address):
                pipe.send(address)
                await anyio.sleep_forever()

    event_loop.run(main)


@dataclass
class Stopping(Lying):
    """A transport whose process stops before its first read, with the places in its hands."""

    has_stopped: bool = False

    async def read(
        self,
        start_id: str,
        copies: Copies,
        *,
        deadline_s: float,
        sums: Sums | None = None,
    ) -> None:
        if not self.has_stopped:
            self.has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        await self.inner.read(start_id, copies, deadline_s=deadline_s, sums=sums)


def run_stopping_reader(
    pipe: Connection, setting: Setting, address: str, seed: int, blocks: int
) -> None:
    """A worker that pulls a chain and stops in the middle; continued, it says what it has (checked
    byte by byte) and what it counted, and pulls again whenever it is asked to."""

    async def main() -> None:
        async with worker(setting, address, blocks, "slow") as (store, memory):
            transfers = store._moving()
            assert transfers.endpoints.reader is not None
            transfers.endpoints.reader = Stopping(transfers.endpoints.reader)
            pipe.send("ready")
            while True:
                pipe.send((sorted(await pull(store, memory, seed, blocks)), dict(store.counts)))
                await asyncio.to_thread(pipe.recv)

    event_loop.run(main)
