"""How fast is a store node, beside memcpy, Redis and Mooncake Store on the same machine?

Puts and gets of 64 blocks of 128 KiB, 512 KiB and 2 MiB between two processes, over each transport.
Ours are what a client does: lease, transfer, and the checksum of every block in its slot; its slots
are shared pages, as `open_store` has them. Memory on both sides was touched before, and all of a
working set of 512 MiB is used in turn, so that no cache helps. Beside them, measured in turn with
them: the same copies by one core's `memcpy`; Redis over a Unix socket in its better mode; Mooncake
Store over TCP (its master and another process that lends the memory). Then single blocks, and
lookups of 256 keys from four processes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np

import rig
from kvass.common import event_loop
from kvass.common.block import BlockLayout
from kvass.common.collector import spare_what_is_loaded
from kvass.common.config import ClusterConfig
from kvass.common.keys import Chain
from kvass.common.pages import shared_pages
from kvass.common.pool.memory import SlotMemory
from kvass.common.rpc.credentials import credentials_of
from kvass.common.transport.route import Setting
from kvass.kvstore.client.store import StoreClient, open_client
from kvass.kvstore.placement import StoreNode
from rig import Figure
from rig_peers import Missing, Peer, mooncake, redis
from transfer import (
    BLOCKS,
    DEADLINE_S,
    Memcpy,
    a_client,
    chains,
    config_of,
    get_s,
    hello_of,
    process,
    run_node,
)

# Layouts whose blocks have these sizes: 32 layers of 1, 4 and 16 KV heads of 64, in bf16.
LAYOUTS = {
    name: BlockLayout(layers=32, kv_heads=heads, head_dim=64, block_tokens=16, kv_dtype="bf16")
    for name, heads in (("128 KiB", 1), ("512 KiB", 4), ("2 MiB", 16))
}
# Of memcpy, over the same host's transport; of the better other store; of Mooncake, over TCP.
MEMCPY_SHARE = {"128 KiB": 0.5, "512 KiB": 0.6, "2 MiB": 0.6}
PEER_RATIO, TCP_RATIO = 3.0, 1.5
WORKING_SET_BYTES, QUICK_WORKING_SET_BYTES = 512 << 20, 64 << 20
SINGLES, REST_S = 400, 0.002  # a single block is asked for when nothing has run for so long
LOOKUP_KEYS, LOOKUP_CLIENTS, LOOKUP_S = 256, 4, 4.0
LOOKUPS_LEAST = 300_000.0  # keys a second


Verb = Literal["put", "get"]
VERBS: tuple[Verb, ...] = ("get", "put")


class Sample:
    """Rates of puts and gets. Mutable fields: both, bytes a second."""

    def __init__(self) -> None:
        self.put: list[float] = []
        self.get: list[float] = []

    def of(self, verb: Verb) -> float:
        """Return the median in GB/s."""
        return statistics.median(self.put if verb == "put" else self.get) / 1e9


async def put_s(store: StoreClient, chain: Chain, row: int) -> float:
    """Return the seconds of one put, which must be whole."""
    slots = range(row * BLOCKS, (row + 1) * BLOCKS)
    started_s = time.perf_counter()
    result = await store.push(
        chain, range(BLOCKS), slots, hold_owner=None, tenant="", deadline_s=DEADLINE_S
    )
    taken_s = time.perf_counter() - started_s
    assert len(result.stored) == BLOCKS, result
    return taken_s


async def ours(
    kind: Setting, layout: BlockLayout, rows: int, rounds: int
) -> tuple[Sample, Sample, list[float]]:
    """Return our rates, memcpy's (as puts and gets alike), and the seconds of single blocks."""
    size = BLOCKS * layout.block_size
    memory = SlotMemory(layout, rows * BLOCKS, shared_pages)
    memory.array[:] = 3
    plain = Memcpy(rows, layout)
    found, copied, names = Sample(), Sample(), chains(rows)
    slab_bytes = (rows + 2) * size + (64 << 20)
    spare_what_is_loaded()  # as a worker does
    with process(run_node, config_of(kind, slab_bytes)) as address:
        async with a_client(kind, address, memory, layout) as store:
            for number in range(rounds + 1):
                await store.drop(keys=[key for chain in names for key in chain.keys])
                for row, chain in enumerate(names):
                    memory.array[row * BLOCKS : (row + 1) * BLOCKS] = row
                    rate = size / await put_s(store, chain, row)
                    if number:  # the first round touches the slab
                        found.put.append(rate)
            for number in range((rounds + 1) * rows):
                row = number % rows
                copy_rate = size / plain.copy_s(memory, (row + rows // 2) % rows)
                rate = size / await get_s(store, names[row], row)
                assert (memory.array[row * BLOCKS + number % BLOCKS] == row).all()
                if number >= rows:  # the first round maps the slab's pages
                    copied.put.append(copy_rate)
                    copied.get.append(copy_rate)
                    found.get.append(rate)
            singles: list[float] = []
            for number in range(SINGLES if rounds > 1 else 20):
                await asyncio.sleep(REST_S)
                singles.append(await get_s(store, names[number % rows], number % rows, 1))
    return found, copied, singles


def theirs(peer: Peer, block_size: int, rows: int, rounds: int) -> Sample:
    """Return the rates of a peer's better mode, by puts and by gets."""
    size = BLOCKS * block_size
    memory = np.full((rows * BLOCKS, block_size), 3, dtype=np.uint8)
    best = Sample()
    for mode in peer.modes:
        found = Sample()
        for number in range(rounds):
            for row in range(rows):
                blocks = memory[row * BLOCKS : (row + 1) * BLOCKS]
                keys = [f"{mode}-{number}-{row}-{i}" for i in range(BLOCKS)]
                started_s = time.perf_counter()
                peer.put(mode, keys, blocks)
                middle_s = time.perf_counter()
                peer.get(mode, keys, blocks)
                found.put.append(size / (middle_s - started_s))
                found.get.append(size / (time.perf_counter() - middle_s))
        if not best.put or found.of("put") > best.of("put"):
            best.put = found.put
        if not best.get or found.of("get") > best.of("get"):
            best.get = found.get
    return best


def peer_samples(block_size: int, rows: int, rounds: int) -> Iterator[tuple[str, Sample]]:
    """Yield the rates of each peer that is there; say which is not."""
    room = 2 * rounds * rows * BLOCKS * block_size + (512 << 20)
    for name, peer in (("Redis", redis()), ("Mooncake", mooncake(room))):
        try:
            with peer as running:
                yield name, theirs(running, block_size, rows, rounds)
        except Missing as missing:
            print(f"not measured: {missing}", file=sys.stderr)


def moving(quick: bool) -> Iterator[Figure]:
    """Yield the figures of puts and gets."""
    rounds = 1 if quick else 3
    working_set = QUICK_WORKING_SET_BYTES if quick else WORKING_SET_BYTES
    for name, layout in LAYOUTS.items():
        rows = max(2, working_set // (BLOCKS * layout.block_size))
        peers = dict(peer_samples(layout.block_size, rows, 1))
        for kind in ("local", "tcp"):
            found, copied, singles = event_loop.run(ours, kind, layout, rows, rounds)
            for verb in VERBS:
                what, rate = f"{name}, {kind}: {verb}", found.of(verb)
                if kind == "local":
                    yield Figure(
                        what, rate, "GB/s", "memcpy by one core", copied.of(verb),
                        least_ratio=MEMCPY_SHARE[name],
                    )  # fmt: skip
                if kind == "local" and peers:
                    best = max(peers, key=lambda peer: peers[peer].of(verb))
                    yield Figure(
                        what, rate, "GB/s", f"{best}, the better peer", peers[best].of(verb),
                        least_ratio=PEER_RATIO,
                    )  # fmt: skip
                if kind == "tcp" and "Mooncake" in peers:
                    yield Figure(
                        what, rate, "GB/s", "Mooncake over TCP", peers["Mooncake"].of(verb),
                        least_ratio=TCP_RATIO,
                    )  # fmt: skip
            ordered = sorted(singles)
            p50, p99 = (1e3 * ordered[int(len(ordered) * share)] for share in (0.5, 0.99))
            yield Figure(f"{name}, {kind}: get of one block after a rest, p50", p50, "ms")
            yield Figure(f"{name}, {kind}: get of one block after a rest, p99", p99, "ms")


# --- lookups --------------------------------------------------------------------------------------


def run_asker(pipe: Connection, address: str, seconds: float) -> None:
    """Look 256 keys up, again and again, once told to; then tell how long each call took."""

    async def main() -> None:
        config, credentials = config_of("auto", 1).transport, credentials_of(ClusterConfig())
        async with open_client(config, hello_of("decode"), credentials) as store:
            store.set_nodes([StoreNode("store-0", address, 1 << 30)])
            chain, ranges = chains(1, LOOKUP_KEYS)[0], [(0, LOOKUP_KEYS)]
            assert await store.lookup(chain, ranges, deadline_s=DEADLINE_S) == ranges
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            times_s = []
            ends_s = time.perf_counter() + seconds
            while (begun_s := time.perf_counter()) < ends_s:
                await store.lookup(chain, ranges, deadline_s=DEADLINE_S)
                times_s.append(time.perf_counter() - begun_s)
            pipe.send(times_s)

    event_loop.run(main)


async def fill_for_lookups(address: str) -> None:
    layout = LAYOUTS["128 KiB"]
    memory = SlotMemory(layout, LOOKUP_KEYS)
    async with a_client("local", address, memory, layout) as store:
        everything = range(LOOKUP_KEYS)
        result = await store.push(
            chains(1, LOOKUP_KEYS)[0], everything, everything,
            hold_owner=None, tenant="", deadline_s=DEADLINE_S,
        )  # fmt: skip
        assert len(result.stored) == LOOKUP_KEYS


def lookups(seconds: float) -> Iterator[Figure]:
    """Yield what four processes get out of one node at once."""
    context = multiprocessing.get_context("spawn")
    with (
        process(run_node, config_of("local", 256 << 20)) as address,
        contextlib.ExitStack() as stack,
    ):
        event_loop.run(fill_for_lookups, address)
        pipes = []
        for _ in range(LOOKUP_CLIENTS):
            ours, theirs_ = context.Pipe()
            child = context.Process(target=run_asker, args=(theirs_, address, seconds), daemon=True)
            child.start()
            stack.callback(child.join)
            stack.callback(child.kill)
            pipes.append(ours)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        for pipe in pipes:
            pipe.send("go")
        times_s = sorted(time_s for pipe in pipes for time_s in pipe.recv())
    rate = len(times_s) * LOOKUP_KEYS / seconds
    yield Figure(
        f"lookups of {LOOKUP_KEYS} keys by {LOOKUP_CLIENTS} clients", rate, "keys/s",
        "asked", LOOKUPS_LEAST, least_ratio=1.0,
    )  # fmt: skip
    for share in (0.5, 0.99):
        taken_ms = 1e3 * times_s[int(len(times_s) * share)]
        yield Figure(f"one such lookup, p{100 * share:.0f}", taken_ms, "ms")


def figures(quick: bool) -> list[Figure]:
    return [*moving(quick), *lookups(0.5 if quick else LOOKUP_S)]


def main() -> int:
    given = rig.options((__doc__ or "").splitlines()[0])
    working_set = QUICK_WORKING_SET_BYTES if given.quick else WORKING_SET_BYTES
    made = figures(given.quick)
    rig.report(f"{BLOCKS} blocks, working set {working_set >> 20} MiB, medians", made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
