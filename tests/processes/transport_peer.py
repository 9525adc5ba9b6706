"""A second process for the transport tests: it owns some memory, and does what it is told.

Each command is a method of `_Served`; its answer is a value, or the name of the error it raised.
"""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from kvass.common import event_loop
from kvass.common.config import TransportConfig
from kvass.common.errors import KvassError
from kvass.common.transport.endpoints import Endpoints
from kvass.common.transport.identity import own_identity
from kvass.common.transport.seam import Copies, EndpointCard, Loan, Region

BLOCK = 192_000
Bytes = NDArray[np.uint8]


def memory(size: int, fill: int) -> Bytes:
    """Return memory on big pages, as slabs and pools are, every page touched."""
    mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, dtype=np.uint8)
    array[:] = fill
    return array


def whole(local: int, remote: int, size: int, piece: int = 1 << 20) -> Copies:
    """Return copies of `size` bytes in pieces."""
    offsets = np.arange(0, size, piece, dtype=np.uint64)
    sizes = np.minimum(np.uint64(piece), np.uint64(size) - offsets)
    return Copies(offsets + np.uint64(local), offsets + np.uint64(remote), sizes)


def values_of(array: Bytes) -> list[int]:
    """Return the different values, without sorting 192 MiB."""
    seen = np.zeros(256, dtype=np.bool_)
    seen[array] = True
    return [int(value) for value in np.flatnonzero(seen)]


def address_of(array: Bytes) -> int:
    return int(array.ctypes.data)


async def open_over(array: Bytes, config: TransportConfig) -> Endpoints:
    from kvass.common.transport.nixl import open_endpoints

    return await open_endpoints(config, own_identity(), [Region(array.ctypes.data, array.nbytes)])


def listening(pid: int) -> set[tuple[str, int]]:
    found = psutil.Process(pid).net_connections("inet")
    return {
        (c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN or not c.raddr
    }


class Peer:
    """The parent's handle on the second process."""

    def __init__(self, size: int, fill: int, config: TransportConfig | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, size, fill, config or TransportConfig(landing_bytes=size))
        self.process = context.Process(target=_main, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.card: EndpointCard
        self.address: int
        self.card, self.address = self.answer(30)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def tell(self, command: str, *arguments: object) -> None:
        self._pipe.send((command, arguments))

    def answer(self, timeout_s: float = 20) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError("the peer process did not answer")
        return self._pipe.recv()

    async def ask(self, command: str, *arguments: object) -> Any:
        self.tell(command, *arguments)
        return await asyncio.to_thread(self.answer)

    async def answered(self) -> Any:
        return await asyncio.to_thread(self.answer)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Pair(NamedTuple):
    """A second process, and this one's endpoints over memory of its own."""

    peer: Peer
    own: Endpoints
    array: Bytes


@asynccontextmanager
async def a_pair(size: int) -> AsyncIterator[Pair]:
    """Open both, with `size` bytes each: the peer's are all 7, the own all 5."""
    peer = Peer(size, fill=7)
    try:
        array = memory(size, 5)
        own = await open_over(array, TransportConfig(landing_bytes=size))
        try:
            yield Pair(peer, own, array)
        finally:
            own.close()
    finally:
        peer.kill()


class _Served:
    def __init__(self, array: Bytes, endpoints: Endpoints) -> None:
        self.array = array
        self.endpoints = endpoints
        self.loan: Loan | None = None

    async def read(self, card: EndpointCard, address: int, size: int, deadline_s: float) -> str:
        reader = self.endpoints.reader
        assert reader is not None
        await reader.attach(card)
        copies = whole(address_of(self.array), address, size)
        await reader.read(card.start_id, copies, deadline_s=deadline_s)
        return "done"

    async def write(
        self, card: EndpointCard, tag: bytes, address: int, size: int, deadline_s: float
    ) -> str:
        await self.endpoints.writer.attach(card)
        copies = whole(address_of(self.array), address, size)
        await self.endpoints.writer.write(card.start_id, copies, tag=tag, deadline_s=deadline_s)
        return "done"

    async def lend(self, size: int) -> tuple[EndpointCard, bytes, int]:
        self.loan = await self.endpoints.landing.lend(size)
        assert self.loan is not None
        return self.loan.card, self.loan.tag, self.loan.address

    async def take(self, deadline_s: float) -> str:
        """Wait for the loan's bytes and copy them into the own memory; abandon it if none come."""
        assert self.loan is not None
        try:
            await self.loan.arrived(deadline_s=deadline_s)
        except KvassError:
            self.loan.abandon()
            raise
        self.array[: self.loan.size] = np.frombuffer(self.loan.view(), dtype=np.uint8)
        self.loan.settle()
        return "done"

    async def fill(self, value: int) -> None:
        self.array[:] = value

    async def fill_blocks(self, size: int) -> None:
        """Fill block i with the value i."""
        for index in range(len(self.array) // size):
            self.array[index * size : (index + 1) * size] = index % 256

    async def block_values(self, size: int, count: int) -> list[list[int]]:
        blocks = self.array[: count * size].reshape(count, size)
        return [values_of(block) for block in blocks]

    async def fill_loan(self, value: int) -> None:
        assert self.loan is not None
        np.frombuffer(self.loan.view(), dtype=np.uint8)[:] = value

    async def values(self) -> list[int]:
        return values_of(self.array)

    async def loan_values(self) -> list[int]:
        assert self.loan is not None
        return values_of(np.frombuffer(self.loan.view(), dtype=np.uint8))

    async def counts(self) -> dict[str, int]:
        return self.endpoints.landing.counts()


def _main(pipe: Connection, size: int, fill: int, config: TransportConfig) -> None:
    event_loop.run(_serve, pipe, size, fill, config)


async def _serve(pipe: Connection, size: int, fill: int, config: TransportConfig) -> None:
    array = memory(size, fill)
    endpoints = await open_over(array, config)
    served = _Served(array, endpoints)
    pipe.send((endpoints.card(), address_of(array)))
    while True:
        try:
            command, arguments = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        try:
            pipe.send(await getattr(served, command)(*arguments))
        except KvassError as error:
            pipe.send(type(error).__name__)
    endpoints.close()
