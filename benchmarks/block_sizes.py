"""How many tokens should a block have: what do 16, 32 and 64 cost and give?

A table for each size, fp8 and the default model's layout:

    attention   a decode step over contexts of 4k to 16k, one row and eight: KV bytes a second by
                the compiled kernels, beside blocks of 16, in turn with them
    hits        of a trace's prompt tokens, those whose KV is there already, in a store that keeps
                all: whole blocks only, and never a prompt's last token
    lost        tokens of prompts that fill no block, so that nobody finds them again
    get         1,024 tokens from another process, as `transfer.py` does, beside one core's memcpy
    index       memory of a store node's index for a million tokens

The trace names its prompts' pieces of 512 tokens, so what is equal is known to 512 only. *At
least*: pieces that are equal, and an equal prompt to its end. *At most*: a prompt that begins with
all whole pieces of an earlier one, and is long enough, goes on from the end of that one's answer.
`rig_trace.py` says where the trace is from.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import math
import os
import statistics
import sys
import time
import tracemalloc
from collections import defaultdict
from dataclasses import dataclass

import torch

import rig
import rig_trace
from kernels import Call, Pool, timed
from kvass.common import event_loop
from kvass.common.block import BlockHeader, BlockLayout
from kvass.common.keys import SEGMENT_BLOCKS, Chain, Namespace
from kvass.common.pool.memory import SlotMemory
from kvass.kvstore.eviction.reuse import ReuseEviction
from kvass.kvstore.index.extents import Extents
from kvass.kvstore.index.ledger import Ledger
from kvass.kvstore.index.shares import Allotments, Shares
from rig import Figure
from rig_trace import PIECE, Prompt, prompts_of
from transfer import DEADLINE_S, LAYOUT, Memcpy, a_client, config_of, process, run_node

SIZES = (16, 32, 64)
CONTEXTS, ROWS = (4096, 8192, 16_384), (1, 8)
POOL_BYTES = 256 << 20  # of each size; eight rows share slots beyond that
REPETITIONS, QUICK_REPETITIONS = 7, 3
GET_TOKENS = 1024
GET_BYTES, QUICK_GET_BYTES = 512 << 20, 64 << 20  # working set: no get finds its bytes in a cache
GETS, QUICK_GETS = 120, 20
INDEX_TOKENS = 1_000_000
SPACE = Namespace(b"t" * 32)


# --- the trace ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares of all prompts' tokens."""

    least: float
    most: float
    lost: float


def shared(prompts: list[Prompt]) -> list[tuple[int, int]]:
    """Return how many first tokens of each prompt an earlier one or its answer had: at least, and
    at most."""
    seen: set[int] = set()
    ends: defaultdict[int, list[int]] = defaultdict(list)  # of whole answers, by last whole piece
    found = []
    for prompt in prompts:
        count = 0
        while count < len(prompt.pieces) and prompt.pieces[count] in seen:
            count += 1
        least = min(count * PIECE, prompt.tokens)
        most = least
        for piece in prompt.pieces[:count]:
            known = ends[piece]
            fitting = bisect.bisect_right(known, prompt.tokens)
            most = max(most, known[fitting - 1] if fitting else 0)
        found.append((least, most))
        seen.update(prompt.pieces)
        if prompt.last_whole is not None:
            bisect.insort(ends[prompt.last_whole], prompt.tokens + prompt.answer)
    return found


def reuse(prompts: list[Prompt], found: list[tuple[int, int]], size: int) -> Reuse:
    """Return what blocks of `size` tokens make of the tokens that were `shared`."""

    def blocks_of(tokens: int, prompt: Prompt) -> int:
        return min(tokens, prompt.tokens - 1) // size * size

    total = sum(prompt.tokens for prompt in prompts)
    pairs = list(zip(prompts, found, strict=True))
    least = sum(blocks_of(least, prompt) for prompt, (least, _) in pairs)
    most = sum(blocks_of(most, prompt) for prompt, (_, most) in pairs)
    lost = sum(prompt.tokens % size for prompt in prompts)
    return Reuse(least / total, most / total, lost / total)


def trace_figures(prompts: list[Prompt], found: list[tuple[int, int]], size: int) -> list[Figure]:
    ours, first = reuse(prompts, found, size), reuse(prompts, found, SIZES[0])
    beside = f"blocks of {SIZES[0]}"
    return [
        Figure("hits, at least", 100 * ours.least, "%", beside, 100 * first.least),
        Figure("hits, at most", 100 * ours.most, "%", beside, 100 * first.most),
        Figure("lost in blocks that never fill", 100 * ours.lost, "%", beside, 100 * first.lost),
    ]


# --- attention ------------------------------------------------------------------------------------


def attention_figures(repetitions: int) -> dict[int, list[Figure]]:
    pools = {size: Pool("fp8", size, POOL_BYTES) for size in SIZES}
    made: dict[int, list[Figure]] = {size: [] for size in SIZES}
    for context in CONTEXTS:
        for rows in ROWS:
            calls: dict[str, Call] = {}
            for size, pool in pools.items():
                tables = pool.tables(rows, context)
                last = [context - 1] * rows
                calls[str(size)] = pool.attention(tables, list(range(rows)), last)
            seconds = timed(calls, repetitions)
            # The same bytes for each size, but for padding.
            read = pools[SIZES[0]].bytes_read(rows, context) / 1e9
            first = read / seconds[str(SIZES[0])]
            for size in SIZES:
                name = f"attention, {context // 1024}k, {rows} row{'s' if rows > 1 else ''}"
                rate = read / seconds[str(size)]
                made[size].append(Figure(name, rate, "GB/s", f"blocks of {SIZES[0]}", first))
    return made


# --- transfer -------------------------------------------------------------------------------------


def layout_of(size: int) -> BlockLayout:
    return BlockLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, size, LAYOUT.kv_dtype)


def chain_of(number: int, size: int) -> Chain:
    chain = Chain(SPACE, size)
    chain.extend([number, *range(1, GET_TOKENS)])
    return chain


async def get_seconds(size: int, chains: int, gets: int) -> tuple[list[float], list[float]]:
    """Return the seconds of gets of 1,024 tokens, and of as many blocks' memcpy, in turn."""
    layout, blocks = layout_of(size), GET_TOKENS // size
    memory, beside = SlotMemory(layout, chains * blocks), Memcpy(chains, layout, blocks)
    names = [chain_of(number, size) for number in range(chains)]
    slab_bytes = (chains + 2) * blocks * layout.block_size + (64 << 20)
    times: tuple[list[float], list[float]] = ([], [])
    with process(run_node, config_of("local", slab_bytes)) as address:
        async with a_client("local", address, memory, layout) as store:
            for row, name in enumerate(names):
                slots = range(row * blocks, (row + 1) * blocks)
                memory.array[slots.start : slots.stop] = row
                result = await store.push(
                    *(name, range(blocks), slots),
                    hold_owner=None, tenant="", deadline_s=DEADLINE_S,
                )  # fmt: skip
                assert len(result.stored) == blocks, result
            for number in range(gets):
                row = number % chains
                slots = range(row * blocks, (row + 1) * blocks)
                times[1].append(beside.copy_s(memory, (row + chains // 2) % chains))
                started_s = time.perf_counter()
                there = await store.pull(names[row], range(blocks), slots, deadline_s=DEADLINE_S)
                times[0].append(time.perf_counter() - started_s)
                assert len(there) == blocks, f"{len(there)} of {blocks} blocks came"
                await asyncio.sleep(0.002)  # until the lease is given back
    return times


def get_figure(size: int, quick: bool) -> Figure:
    bytes_got = GET_TOKENS // size * layout_of(size).block_size
    chains = (QUICK_GET_BYTES if quick else GET_BYTES) // bytes_got
    times = event_loop.run(get_seconds, size, chains, QUICK_GETS if quick else GETS)
    got, copied = (bytes_got / statistics.median(each) / 1e9 for each in times)
    return Figure(f"get of {GET_TOKENS:,} tokens", got, "GB/s", "memcpy by one core", copied)


# --- the index ------------------------------------------------------------------------------------


def index_bytes(size: int, tokens: int = INDEX_TOKENS) -> int:
    """Return the memory of a store node's ledger, headers and eviction order for so many tokens."""
    length, count = layout_of(size).block_size, tokens // size
    names = Chain(SPACE, size)  # one long chain: where it is cut changes no size
    names.extend(range(count * size))
    found = [bytes(key) for key in names.keys]
    tracemalloc.start()
    shares = Shares(Allotments(), ReuseEviction)
    ledger = Ledger(Extents(2 * count * length), shares, lambda key: False)
    for number in range(count):
        # As from the wire: every header has its own bytes.
        header = BlockHeader(
            key=bytes(bytearray(found[number])),
            parent=bytes(bytearray(found[number - 1])),
            segment_key=found[number // SEGMENT_BLOCKS],
            index=number, namespace=SPACE, tenant="", writer="prefill-0",
            token_count=size, length=length, checksums=(number << 40,),
        )  # fmt: skip
        entry = ledger.open(header, 1, math.inf)
        assert entry is not None
        ledger.publish([entry], [header])
    ledger.news.clear()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used


# --- the report -----------------------------------------------------------------------------------


def main() -> int:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    rig_trace.add_option(parser)
    given = parser.parse_args()
    if not rig_trace.is_there(given.trace):
        return 2
    torch.set_num_threads(os.cpu_count() or 1)
    prompts = list(prompts_of(given.trace))
    found = shared(prompts)
    with torch.inference_mode():
        attention = attention_figures(QUICK_REPETITIONS if given.quick else REPETITIONS)
    indexes = {size: index_bytes(size) / 1e6 for size in SIZES}
    everything = []
    for size in SIZES:
        beside = f"blocks of {SIZES[0]}"
        figures = [*attention[size], *trace_figures(prompts, found, size)]
        figures.append(get_figure(size, given.quick))
        figures.append(
            Figure("index, a million tokens", indexes[size], "MB", beside, indexes[SIZES[0]])
        )
        title = f"Blocks of {size} tokens: {layout_of(size).block_size:,} bytes"
        rig.report(title, figures, None)
        everything += [dict(each.as_json(), name=f"{size}: {each.name}") for each in figures]
    if given.json is not None:
        given.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
