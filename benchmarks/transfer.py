"""How fast does a get of 64 blocks from another process come, beside a plain copy of as many bytes?

A node and this process exchange blocks of the default model in fp8. A get is what a worker's pull
is: lease, transfer, checksum of every block in its slot. Both sides' memory is touched before, and
no get uses bytes that a cache may still have: they come from, and go to, all of a working set of
512 MiB in turn. The references are measured in turn with the gets: on the same host, the
same 64 copies by one core's `memcpy` within this process; over TCP, as many bytes sent by one
process into a plain loopback socket and received by this one, into the same slots. Beside each get
stand its parts: the call (for a lease, or for a write into the lent buffer, which it contains),
what this process then does with the bytes, and the rest, which is threads waking each other. They
are noted in rounds of their own, since that takes some 30 us of each get.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np

import rig
from kvass.common import event_loop
from kvass.common.block import BlockLayout
from kvass.common.checksum import Sums
from kvass.common.collector import spare_what_is_loaded
from kvass.common.config import ClusterConfig, Config, StoreConfig, TransportConfig
from kvass.common.keys import Chain, Namespace
from kvass.common.pool.memory import SlotMemory
from kvass.common.rpc.credentials import credentials_of
from kvass.common.rpc.hello import Hello
from kvass.common.transport.copies import check
from kvass.common.transport.identity import own_identity
from kvass.common.transport.local import LocalTransport
from kvass.common.transport.peer_process import PeerProcess
from kvass.common.transport.route import Setting
from kvass.common.transport.seam import Copies
from kvass.kvstore.client import pulls
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.links import NodeLink
from kvass.kvstore.node.service import GC_THRESHOLDS, open_node
from kvass.kvstore.placement import StoreNode
from rig import Figure

# The default model's: 30 layers, 3 KV heads of 64.
LAYOUT = BlockLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16, kv_dtype="fp8")
BLOCKS = 64  # of one get
WORKING_SET_BYTES = 512 << 20
QUICK_WORKING_SET_BYTES = 128 << 20
ROUNDS = 6  # through the working set: gets with their parts noted and by themselves, in turn
QUICK_ROUNDS = 2
DEADLINE_S = 10.0


def config_of(kind: Setting, slab_bytes: int) -> Config:
    transport = TransportConfig(kind=kind)
    return Config(transport=transport, store=StoreConfig(slab_bytes=slab_bytes))


def hello_of(role: str) -> Hello:
    who = own_identity()
    return Hello(role, f"{role}-0", who.host_id, who.start_id, who.pid, {})


def chains(count: int, blocks: int = BLOCKS) -> list[Chain]:
    """Return chains that share no block."""
    made = []
    for number in range(count):
        chain = Chain(Namespace(b"t" * 32), LAYOUT.block_tokens)
        chain.extend([number, *range(1, blocks * LAYOUT.block_tokens)])
        made.append(chain)
    return made


# --- the other process ----------------------------------------------------------------------------


def run_node(pipe: Connection, config: Config) -> None:
    """A store node, until it is killed, its process set up as `service.serve` does it."""
    gc.set_threshold(*GC_THRESHOLDS)

    async def main() -> None:
        async with open_node(config, hello_of("store")) as (_, address):
            pipe.send(address)
            await asyncio.sleep(1e6)

    event_loop.run(main)


def run_holder(pipe: Connection, rows: int) -> None:
    """Private memory, to be read by cross-memory attach, and nothing else."""
    memory = SlotMemory(LAYOUT, rows * BLOCKS)
    memory.array[:] = 7
    transport = LocalTransport(own_identity(), [memory.region])
    pipe.send((memory.address, transport.card()))
    time.sleep(1e6)


def run_sender(pipe: Connection, rows: int) -> None:
    """Send row after row of a working set into a socket, one for each byte that comes back."""
    source = np.full((rows, BLOCKS * LAYOUT.block_size), 7, dtype=np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            for number in range(1 << 30):
                if not connection.recv(1):
                    return
                connection.sendall(source[number % rows])


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Any]:
    """Run `target` in a process of its own; yields what it says first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()  # so that a child that dies is an end, not a silence
    try:
        yield ours.recv()
    finally:
        child.kill()
        child.join()


# --- the references -------------------------------------------------------------------------------


class Memcpy:
    """Copies of single blocks within this process, by one core."""

    def __init__(self, rows: int, layout: BlockLayout = LAYOUT, blocks: int = BLOCKS) -> None:
        self._source = SlotMemory(layout, rows * blocks)
        self._source.array[:] = 7
        self._blocks = blocks
        self._size = layout.block_size

    def copy_s(self, target: SlotMemory, row: int) -> float:
        source = self._source
        slots = range(row * self._blocks, (row + 1) * self._blocks)
        pairs = list(zip(*(m.addresses(slots).tolist() for m in (target, source)), strict=True))
        started_s = time.perf_counter()
        for to, of in pairs:
            ctypes.memmove(to, of, self._size)
        return time.perf_counter() - started_s


def alone_s(rows: int, rounds: int) -> list[float]:
    """Return the seconds of reads of private memory by one thread: no lease, no event loop."""
    target = SlotMemory(LAYOUT, rows * BLOCKS)
    target.array[:] = 1
    times_s = []
    with process(run_holder, rows) as (address, card):
        peer = PeerProcess(card)
        for number in range(rounds * rows):
            slots = range(number % rows * BLOCKS, (number % rows + 1) * BLOCKS)
            local = target.addresses(slots)
            remote = [address + slot * LAYOUT.block_size for slot in slots]
            sizes = [LAYOUT.block_size] * BLOCKS
            ranges = (np.array(values, dtype=np.uint64) for values in (local, remote, sizes))
            copies = Copies(*ranges)
            bounds = check(copies, [target.region])
            reading = peer.reading(copies, bounds, Sums.of(BLOCKS, LAYOUT.head_groups))
            started_s = time.perf_counter()
            peer.read(reading, 0, BLOCKS)
            times_s.append(time.perf_counter() - started_s)
        peer.close()
    return times_s


def receive_s(connection: socket.socket, target: SlotMemory, row: int) -> float:
    """Return the seconds from asking for a row to its last byte in the slots."""
    slots = target.array[row * BLOCKS : (row + 1) * BLOCKS].reshape(-1).data
    started_s = time.perf_counter()
    connection.sendall(b"?")
    place = 0
    while place < len(slots):
        place += connection.recv_into(slots[place:])
    return time.perf_counter() - started_s


# --- the gets -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_client(
    kind: Setting, address: str, memory: SlotMemory, layout: BlockLayout = LAYOUT
) -> AsyncIterator[StoreClient]:
    """Yield a client of the node at an address."""
    async with open_client(
        TransportConfig(kind=kind),
        hello_of("decode"),
        credentials_of(ClusterConfig()),
        memory=memory,
        layout=layout,
    ) as store:
        store.set_nodes([StoreNode("store-0", address, 1 << 30)])
        yield store


@contextlib.asynccontextmanager
async def filled_store(
    kind: Setting, address: str, memory: SlotMemory, names: list[Chain]
) -> AsyncIterator[StoreClient]:
    """Yield a client of a node that has every chain's blocks."""
    async with a_client(kind, address, memory) as store:
        for row, chain in enumerate(names):
            slots = range(row * BLOCKS, (row + 1) * BLOCKS)
            memory.array[slots.start : slots.stop] = row
            result = await store.push(
                chain, range(BLOCKS), slots, hold_owner=None, tenant="", deadline_s=DEADLINE_S
            )
            assert len(result.stored) == BLOCKS, result
        yield store


@contextlib.contextmanager
def parts_noted(into: dict[str, list[float]]) -> Iterator[None]:
    """Note how long each call to the node and each handling of bytes takes."""
    call, read, copy = NodeLink.call, LocalTransport.read, pulls._Batch._copy

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        into[name].append(time.perf_counter() - started_s)

    async def noted_call(self: NodeLink, request: Any, **limits: float) -> Any:
        with noted(type(request).__name__):
            return await call(self, request, **limits)

    async def noted_read(*arguments: Any, **named: Any) -> None:
        with noted("bytes"):
            await read(*arguments, **named)

    def noted_copy(*arguments: Any) -> Any:
        with noted("bytes"):
            return copy(*arguments)

    with (
        mock.patch.object(NodeLink, "call", noted_call),
        mock.patch.object(LocalTransport, "read", noted_read),
        mock.patch.object(pulls._Batch, "_copy", noted_copy),
    ):
        yield


async def get_s(store: StoreClient, chain: Chain, row: int, blocks: int = BLOCKS) -> float:
    """Return the seconds of one get into a row of slots, which must be whole. What the one before
    left to be done in the background, giving its lease back, is done in this one's time."""
    slots = range(row * BLOCKS, row * BLOCKS + blocks)
    started_s = time.perf_counter()
    there = await store.pull(chain, range(blocks), slots, deadline_s=DEADLINE_S)
    taken_s = time.perf_counter() - started_s
    assert len(there) == blocks, f"{len(there)} of {blocks} blocks came"
    return taken_s


async def measure(
    kind: Setting, rows: int, rounds: int, reference_s: Callable[[SlotMemory, int], float]
) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return the seconds of gets, of references, taken in turn, and of gets' parts: `whole` are
    those gets of which the parts were noted."""
    names = chains(rows)
    memory = SlotMemory(LAYOUT, rows * BLOCKS)
    spare_what_is_loaded()  # as a worker does
    gets, references, parts = [], [], defaultdict[str, list[float]](list)
    slab_bytes = (rows + 2) * BLOCKS * LAYOUT.block_size + (64 << 20)
    with process(run_node, config_of(kind, slab_bytes)) as address:
        async with filled_store(kind, address, memory, names) as store:
            for number in range(rounds * rows):
                row = number % rows
                references.append(reference_s(memory, (row + rows // 2) % rows))
                if number // rows % 2 == 0:  # the first one maps the other side's pages, too
                    with parts_noted(parts):
                        parts["whole"].append(await get_s(store, names[row], row))
                else:
                    gets.append(await get_s(store, names[row], row))
    return gets, references, parts


def part_figures(parts: dict[str, list[float]], request: str, call: str, work: str) -> list[Figure]:
    """Return what a get's time goes into, in milliseconds of its median."""
    whole, called, worked = (
        1e3 * statistics.median(parts[name]) for name in ("whole", request, "bytes")
    )
    return [
        Figure(f"of it, the call: {call}", called, "ms", "the whole get", whole),
        Figure(f"of it, {work}", worked, "ms", "the whole get", whole),
        Figure("of it, the rest", whole - called - worked, "ms", "the whole get", whole),
    ]


def figures(rows: int, rounds: int) -> list[Figure]:
    size = BLOCKS * LAYOUT.block_size

    def rate(times_s: list[float]) -> float:
        return size / statistics.median(times_s) / 1e9

    gets, copies, parts = event_loop.run(measure, "local", rows, rounds, Memcpy(rows).copy_s)
    made = [
        Figure(
            "get on the same host", rate(gets), "GB/s", "memcpy by one core",
            rate(copies), least_ratio=0.45,
        ),
        Figure(
            "by cross-memory attach alone, out of private memory",
            rate(alone_s(rows, rounds)), "GB/s", "memcpy by one core", rate(copies),
        ),
        *part_figures(parts, "GetBegin", "lease", "read and check"),
    ]  # fmt: skip
    with process(run_sender, rows) as port, socket.create_connection(("127.0.0.1", port)) as plain:
        gets, copies, parts = event_loop.run(
            measure, "tcp", rows, rounds, lambda memory, row: receive_s(plain, memory, row)
        )
    made.append(
        Figure(
            "get over TCP", rate(gets), "GB/s", "a plain loopback socket",
            rate(copies), least_ratio=0.6,
        )
    )  # fmt: skip
    return made + part_figures(parts, "GetWrite", "write", "copy and check")


def main() -> int:
    given = rig.options((__doc__ or "").splitlines()[0])
    working_set = QUICK_WORKING_SET_BYTES if given.quick else WORKING_SET_BYTES
    rows = working_set // (BLOCKS * LAYOUT.block_size)
    made = figures(rows, QUICK_ROUNDS if given.quick else ROUNDS)
    title = f"{BLOCKS} blocks of {LAYOUT.block_size:,} bytes, working set {working_set >> 20} MiB"
    rig.report(f"{title}, medians", made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
