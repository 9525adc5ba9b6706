"""How near is attention over the paged pool to the machine, and to torch's over dense KV?

Blocks of the default model in random slots. As many layers are walked as have WALK_BYTES of fp8,
or all: what a walk reads comes from memory, and a step is taken to be as many layers as there are.

    decode     KV bytes read per second, beside a plain read of the same records in the same order,
               and that beside a contiguous read; steps per second, beside torch's SDPA over as much
               context, dense and in bf16, the faster of two ways to call it
    one table  16 rows of one request (drafts to verify) beside one row
    prefill    a chunk's GFLOP/s (of what causality leaves), beside torch's bf16 products of the
               model's own shapes

Variants take turns in each repetition, so that what else the machine does meets all alike. Values
are medians. Contexts together larger than a pool (2 GiB) share slots, in other orders.

    python benchmarks/kernels.py [--quick] [--json FILE]
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

import rig
from kvass.common.block import BlockLayout, KvDtype
from kvass.common.kernels.native_paged import NativePagedKv
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory
from rig import Figure

LAYERS, KV_HEADS, QUERY_HEADS, DEPTH, BLOCK = 30, 3, 9, 64, 16
HIDDEN, INNER = 576, 1536
FORMATS: tuple[KvDtype, ...] = ("fp8", "int8", "int4", "bf16")
ASKED: tuple[KvDtype, ...] = ("fp8", "int8")
CONTEXTS, ROWS = (4096, 8192, 32_768), (1, 4, 8, 32)
QUICK_CONTEXTS, QUICK_ROWS = (4096, 32_768), (1, 8)
POOL_BYTES = 2 << 30  # 70 MB of fp8 a layer, twice a third-level cache of 32 MiB
WALK_BYTES = 400 << 20
REPETITIONS, QUICK_REPETITIONS = 7, 3
GROUP_ROWS, GROUP_CONTEXT = 16, 16_384
CHUNK, STARTS = 512, (0, 512, 3584, 7680)
PAUSE_S = 0.01  # until no thread of the call before waits for more work on a core
SPLIT = 1024  # positions that the library reads in one piece

Call = Callable[[], object]


def timed(calls: dict[str, Call], repetitions: int) -> dict[str, float]:
    """Return each call's median seconds, after one call of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            time.sleep(PAUSE_S)
            started_s = time.perf_counter()
            call()
            if repetition:
                times[name].append(time.perf_counter() - started_s)
    return {name: median(each) for name, each in times.items()}


class Pool:
    """Full slots and kernels over them. Mutable: nothing after making."""

    def __init__(
        self, kv_dtype: KvDtype, block_tokens: int = BLOCK, size_bytes: int = POOL_BYTES
    ) -> None:
        self.layout = BlockLayout(LAYERS, KV_HEADS, DEPTH, block_tokens, kv_dtype)
        self.memory = SlotMemory(self.layout, size_bytes // self.layout.block_size)
        generator = np.random.default_rng(1)
        for slot in self.memory.array:  # numbers near 1, and scales that are small
            slot[:] = generator.integers(0x20, 0x38, len(slot), dtype=np.uint8)
        self.kv = NativePagedKv(self.memory, self.layout, QUERY_HEADS)

    def tables(self, rows: int, context: int) -> torch.Tensor:
        """Return slots int64 [rows, blocks], each row's in random order and distinct."""
        generator = torch.Generator().manual_seed(1)
        slots, blocks = self.memory.slots, context // self.layout.block_tokens
        together = torch.cat(
            [torch.randperm(slots, generator=generator) for _ in range(rows * blocks // slots + 1)]
        )
        return together[: rows * blocks].view(rows, blocks).contiguous()

    def bytes_read(self, rows: int, context: int) -> int:
        """Return the bytes of codes and scales that attention reads, all layers."""
        per_token = 2 * KV_HEADS * (self.layout.row_size + 2 * self.layout.scale_parts)
        return rows * context * per_token * LAYERS

    def attention(
        self,
        tables: torch.Tensor,
        row_table: list[int],
        positions: list[int],
        layers: int = LAYERS,
    ) -> Call:
        plan = self.kv.plan(tables, torch.tensor(row_table), torch.tensor(positions))
        q = torch.randn(len(positions), QUERY_HEADS, DEPTH).bfloat16()

        def step() -> None:
            for layer in range(layers):
                self.kv.attend(layer, q, plan)

        return step

    def plain_read(self, tables: torch.Tensor, layers: int = LAYERS) -> Call:
        rows, blocks = tables.shape
        splits = -(-blocks * self.layout.block_tokens // SPLIT)
        sums = np.empty(rows * splits * KV_HEADS, dtype=np.uint64)
        word, address = ctypes.c_int64, ctypes.c_void_p
        read = library.function(
            "kvass_read_layer", None, address, word, word, word, address, word, address
        )
        assert read is not None
        threads = torch.get_num_threads()

        def step() -> None:
            for layer in range(layers):
                read(
                    *(self.kv.pool_address, layer, rows, blocks),
                    *(tables.data_ptr(), threads, sums.ctypes.data),
                )

        return step

    def contiguous_read(self) -> Call:
        sums = np.empty(-(-self.memory.size // (1 << 20)), dtype=np.uint64)
        word, address = ctypes.c_int64, ctypes.c_void_p
        read = library.function("kvass_read_range", None, address, word, word, address)
        assert read is not None
        threads = torch.get_num_threads()
        return lambda: read(self.memory.address, self.memory.size, threads, sums.ctypes.data)


def sdpa(rows: int, context: int, layers: int) -> dict[str, Call]:
    """Return torch's attention over dense bf16 KV in two ways: with `enable_gqa`, and with a KV
    head's query heads as its rows. Neither is always the faster one.
    """
    size = (layers, 2, rows, KV_HEADS, context, DEPTH)
    memory = torch.full(size, 0.1, dtype=torch.bfloat16)
    q = torch.randn(rows, QUERY_HEADS, 1, DEPTH).bfloat16()

    def step(queries: torch.Tensor, *, grouped: bool) -> None:
        for k, v in memory:
            F.scaled_dot_product_attention(queries, k, v, enable_gqa=grouped)

    as_rows = q.view(rows, KV_HEADS, -1, DEPTH)
    return {
        "sdpa, grouped": partial(step, q, grouped=True),
        "sdpa, as rows": partial(step, as_rows, grouped=False),
    }


def decode(
    pools: dict[KvDtype, Pool], contexts: tuple[int, ...], counts: tuple[int, ...], repetitions: int
) -> list[Figure]:
    found = []
    for context in contexts:
        for rows in counts:
            found += decode_at(pools, context, rows, repetitions)
    return found


def decode_at(
    pools: dict[KvDtype, Pool], context: int, rows: int, repetitions: int
) -> list[Figure]:
    layers = min(LAYERS, -(-WALK_BYTES * LAYERS // pools["fp8"].bytes_read(rows, context)))
    calls = sdpa(rows, context, layers)
    ways = list(calls)
    for kv_dtype, pool in pools.items():
        tables = pool.tables(rows, context)
        last = [context - 1] * rows
        calls[kv_dtype] = pool.attention(tables, list(range(rows)), last, layers)
        calls[f"{kv_dtype} plain"] = pool.plain_read(tables, layers)
    seconds = timed(calls, repetitions)
    steps = {name: layers / LAYERS / each for name, each in seconds.items()}
    theirs = max(steps[way] for way in ways)
    found = []
    for kv_dtype, pool in pools.items():
        size = pool.bytes_read(rows, context) / 1e9
        rate, plain = size * steps[kv_dtype], size * steps[f"{kv_dtype} plain"]
        name = f"{kv_dtype}, {context // 1024}k, {rows} row{'s' if rows > 1 else ''}"
        # Asked of the formats of one byte only.
        of_plain, of_dense = (0.6, 1.5) if kv_dtype in ASKED else (None, None)
        found += [
            Figure(f"{name}: KV", rate, "GB/s", "plain read", plain, least_ratio=of_plain),
            Figure(
                *(f"{name}: steps", steps[kv_dtype], "/s", "dense SDPA", theirs),
                least_ratio=of_dense,
            ),
        ]
    return found


def memory_rate(pool: Pool, repetitions: int) -> Figure:
    tables = pool.tables(1, pool.memory.slots * BLOCK // SPLIT * SPLIT)
    seconds = timed(
        {"order": pool.plain_read(tables), "whole": pool.contiguous_read()}, repetitions
    )
    size = pool.bytes_read(1, tables.shape[1] * BLOCK) / 1e9
    whole = pool.memory.size / 1e9 / seconds["whole"]
    return Figure("plain read of records", size / seconds["order"], "GB/s", "contiguous", whole)


def one_table(pool: Pool, repetitions: int) -> Figure:
    table = pool.tables(1, GROUP_CONTEXT)
    last = list(range(GROUP_CONTEXT - GROUP_ROWS, GROUP_CONTEXT))
    seconds = timed(
        {
            "one": pool.attention(table, [0], last[-1:]),
            "all": pool.attention(table, [0] * GROUP_ROWS, last),
        },
        repetitions,
    )
    one, together = seconds["one"] * 1e3, seconds["all"] * 1e3
    name = f"fp8, {GROUP_ROWS} rows of one table, 16k"
    return Figure(name, together, "ms", "one row", one, limit=1.5 * one)


def products(rows: int) -> tuple[Call, float]:
    """Return the model's products of one step of so many rows, and their GFLOP."""
    shapes = [(960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
    weights = [torch.randn(shape).bfloat16() for _ in range(LAYERS) for shape in shapes]
    inputs = {width: torch.randn(rows, width).bfloat16() for width in (HIDDEN, INNER)}

    def step() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    return step, sum(2e-9 * rows * weight.numel() for weight in weights)


def prefill(pool: Pool, repetitions: int) -> list[Figure]:
    table = pool.tables(1, STARTS[-1] + CHUNK)
    step, size = products(CHUNK)
    calls: dict[str, Call] = {"products": step}
    for start in STARTS:
        calls[str(start)] = pool.attention(table, [0] * CHUNK, list(range(start, start + CHUNK)))
    seconds = timed(calls, repetitions)
    found = []
    for start in STARTS:
        pairs = CHUNK * start + CHUNK * (CHUNK + 1) / 2
        rate = 4e-9 * pairs * QUERY_HEADS * DEPTH * LAYERS / seconds[str(start)]
        name = f"{pool.layout.kv_dtype}, prefill of {CHUNK} after {start}"
        reference = size / seconds["products"]
        found.append(Figure(name, rate, "GFLOP/s", "bf16 products", reference, least_ratio=0.5))
    return found


def main() -> None:
    options = rig.options(__doc__ or "")
    torch.set_num_threads(os.cpu_count() or 1)
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    contexts, counts = (QUICK_CONTEXTS, QUICK_ROWS) if options.quick else (CONTEXTS, ROWS)
    with torch.inference_mode():
        pools = {kv_dtype: Pool(kv_dtype) for kv_dtype in FORMATS}
        figures = [memory_rate(pools["fp8"], repetitions)]
        figures += decode(pools, contexts, counts, repetitions)
        figures.append(one_table(pools["fp8"], repetitions))
        for kv_dtype in ASKED:
            figures += prefill(pools[kv_dtype], repetitions)
    title = f"Attention over the paged pool, {library.level()}, {torch.get_num_threads()} threads"
    rig.report(title, figures, options.json)


if __name__ == "__main__":
    main()
