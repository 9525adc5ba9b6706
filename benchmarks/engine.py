"""How near is the model's arithmetic to what the machine can do, and where does a step's time go?

    read        memory read by one thread, and by two: torch sums 512 MiB
    weights     GB/s of weights that products of few rows read, packed by the compiled library and
                as torch has them; "a step": all products of the default model, one after the other
    product     GFLOP/s of products of many rows
    kept as     one matrix in each way that weights are kept: GB/s of its own bytes beside memory's
                with few rows, and GFLOP/s beside torch's of bf16
    step        one decode step through the runner, default model, a context of 512 tokens each, and
                which part of it is products, norms and gates, attention, and the rest

Every shape has so many copies of its weight that none is in a cache when it is read again. Values
are medians of repetitions that take turns between the two ways.

    python benchmarks/engine.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, cast

import torch

import rig
from kvass.common.block import BlockLayout
from kvass.common.kernels import packed, row_operations
from kvass.common.kernels.gguf_blocks import SIZES, BlockKind, Blocks
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.packed import HugePages, PackedWeight
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.model.layers import linear
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import ModelSpec, load_spec
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory
from rig import Figure

READ_BYTES = 512 << 20
COLD_BYTES = 192 << 20  # of copies of a weight: six times the third-level cache here
KEPT_ROWS = (1, 8, 512)
MANY_COPIES = 12  # with many rows arithmetic is what takes time, wherever weights are
FEW, QUICK_FEW = (1, 2, 4, 8, 16), (1, 8)
MANY, QUICK_MANY = (64, 512), (512,)
ROUNDS, QUICK_ROUNDS = 7, 3
REST_S = 0.02  # torch's second thread looks for work some milliseconds long, and takes the core
BLOCK, CONTEXT = 16, 512
BATCHES = (1, 8)
STEPS, QUICK_STEPS = 100, 30
Way = Callable[[int], object]  # computes with the copy of this number


def median_s(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Run the ways in turns; return each one's median time."""
    times: list[list[float]] = [[] for _ in ways]
    for way in ways:
        way()
    for _ in range(rounds):
        for way, taken in zip(ways, times, strict=True):
            time.sleep(REST_S)
            started_s = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started_s)
    return [median(taken) for taken in times]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_rates(threads: int) -> dict[int, float]:
    """Return GB/s that memory gives, by the number of threads."""
    values = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    found = {}
    for count in sorted({1, threads}):
        with torch_threads(count):
            found[count] = READ_BYTES / median_s([values.sum], 7)[0] / 1e9
    return found


# --- products -------------------------------------------------------------------------------------


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each product of a layer, and of the logits."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "qkv": (spec.q_size + 2 * spec.kv_heads * spec.head_dim, hidden),
        "output": (hidden, spec.q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "logits": (spec.vocab_size, hidden),
    }


class Shape:
    """Copies of one weight, as both ways have them."""

    def __init__(self, outputs: int, inputs: int, threads: int, pages: HugePages) -> None:
        self.size = 2 * outputs * inputs
        self.inputs = inputs
        self.copies = max(1, COLD_BYTES // self.size)
        self.plain = [torch.randn(outputs, inputs).to(torch.bfloat16) for _ in range(self.copies)]
        self.packed = [PackedWeight.of(weight, None, threads, pages) for weight in self.plain]

    def times(self, count: int, threads: int, rounds: int) -> list[float]:
        """Return seconds a product of `count` rows: packed, and torch's."""
        rows = torch.randn(count, self.inputs).to(torch.bfloat16)
        weights = [replace(weight, threads=threads) for weight in self.packed]

        def ours() -> None:
            for weight in weights:
                weight(rows)

        def theirs() -> None:
            for weight in self.plain:
                linear(rows, weight)

        with torch_threads(threads):
            return [taken / self.copies for taken in median_s([ours, theirs], rounds)]


def product_figures(spec: ModelSpec, threads: int, quick: bool) -> list[Figure]:
    few, many = (QUICK_FEW, QUICK_MANY) if quick else (FEW, MANY)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    reads = read_rates(threads)
    found = [
        Figure(f"read, {count} thread{'s' * (count > 1)}", rate, "GB/s")
        for count, rate in reads.items()
    ]
    step = {(count, used): [0.0, 0.0] for count in few for used in reads}
    step_bytes, arithmetic = 0, list[Figure]()
    for name, (outputs, inputs) in shapes_of(spec).items():
        times = 1 if name == "logits" else spec.layers
        shape = Shape(outputs, inputs, threads, HugePages())
        step_bytes += times * shape.size
        for count, used in step:
            taken = shape.times(count, used, rounds)
            step[count, used] = [
                a + times * b for a, b in zip(step[count, used], taken, strict=True)
            ]
            what = f"{name} {outputs}x{inputs}, {count} rows, {used} threads"
            found.append(rate_figure(what, shape.size, taken, "GB/s"))
        for count in many if name != "logits" else ():
            taken = shape.times(count, threads, rounds)
            what = f"{name} {outputs}x{inputs}, {count} rows, {threads} threads"
            arithmetic.append(rate_figure(what, count * shape.size, taken, "GFLOP/s"))
    for (count, used), taken in step.items():
        what = f"a step, {count} rows, {used} threads"
        found.append(rate_figure(what, step_bytes, taken, "GB/s"))
        if count == 1:
            rate = step_bytes / taken[0] / 1e9
            found.append(Figure(what, rate, "GB/s", "memory read", reads[used]))
    return found + arithmetic


class Kept:
    """Copies of one matrix kept as `format`, of random blocks where that is a GGUF file's."""

    def __init__(self, format: WeightFormat | BlockKind, plain: torch.Tensor, threads: int) -> None:
        outputs, inputs = plain.shape
        weight: torch.Tensor | Blocks = plain
        made: WeightFormat = "bf16"
        if format in SIZES:
            values, size = SIZES[format]
            # Zero scales: what a value is changes nothing.
            raw = torch.zeros(outputs, inputs // values * size, dtype=torch.uint8)
            weight = Blocks(format, inputs, raw)
        else:
            made = cast(WeightFormat, format)
        pages = HugePages()
        first = PackedWeight.of(weight, None, threads, pages, made)
        self.size = first.panels.nbytes
        self.weights = [
            replace(first, panels=_copied(first.panels, pages))
            for _ in range(max(1, COLD_BYTES // self.size))
        ]

    def run(self, rows: torch.Tensor, copies: int) -> None:
        for weight in self.weights[:copies]:
            weight(rows)


def _copied(panels: torch.Tensor, pages: HugePages) -> torch.Tensor:
    room = pages.take(panels.nbytes)[: panels.nbytes]
    return room.view(panels.dtype).view(panels.shape).copy_(panels)


def kept_figures(spec: ModelSpec, threads: int, quick: bool) -> list[Figure]:
    """Measure each format in the shape of `down`, the one whose inputs fill every kind of block."""
    outputs, inputs = spec.hidden_size, spec.intermediate_size
    plain = torch.randn(outputs, inputs).to(torch.bfloat16)
    read = read_rates(threads)[threads]
    formats: tuple[WeightFormat | BlockKind, ...] = ("bf16", "int8", "int4", *SIZES)
    found = []
    for format in formats:
        if format in SIZES and inputs % SIZES[format][0]:
            continue
        kept = Kept(format, plain, threads)
        torch_has = [plain.clone() for _ in range(max(1, COLD_BYTES // (2 * plain.numel())))]
        for count in KEPT_ROWS:
            rows = torch.randn(count, inputs).to(torch.bfloat16)

            most = MANY_COPIES if count >= MANY[0] else len(kept.weights)
            beside = torch_has[:most]

            def ours(kept: Kept = kept, rows: torch.Tensor = rows, most: int = most) -> None:
                kept.run(rows, most)

            def theirs(rows: torch.Tensor = rows, has: list[torch.Tensor] = beside) -> None:
                for weight in has:
                    linear(rows, weight)

            with torch_threads(threads):
                rounds = QUICK_ROUNDS if quick else ROUNDS
                ours_s, theirs_s = median_s([ours, theirs], rounds)
            each, torch_each = ours_s / most, theirs_s / len(beside)
            what = f"{outputs}x{inputs} kept as {format}, {count} rows"
            found.append(Figure(what, kept.size / each / 1e9, "GB/s", "memory read", read))
            flop = 2e-9 * count * plain.numel()
            torch_rate = flop / torch_each
            found.append(Figure(what, flop / each, "GFLOP/s", "torch, bf16", torch_rate))
    return found


def rate_figure(what: str, amount: int, taken: Sequence[float], unit: str) -> Figure:
    ours, theirs = (amount / each / 1e9 for each in taken)
    return Figure(what, ours, unit, "torch", theirs)


# --- a step ---------------------------------------------------------------------------------------


class Watch:
    """Sums the time that calls take, by what they are. Mutable field: `taken_s`."""

    def __init__(self) -> None:
        self.taken_s: dict[str, float] = {}

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            result = function(*arguments, **named)
            self.taken_s[part] += time.perf_counter() - started_s
            return result

        return timed

    def put_on(self, owner: Any, name: str, part: str) -> None:
        self.taken_s[part] = 0.0
        setattr(owner, name, self.around(part, getattr(owner, name)))


def step_figures(served: rig.Served, steps: int) -> list[Figure]:
    spec = load_spec(served.folder)
    model = load_model(served.folder, spec, projection_of=Products(uses()).projection)
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
    blocks = CONTEXT // BLOCK
    kv = TorchPagedKv(SlotMemory(layout, max(BATCHES) * blocks), layout, spec.heads)
    runner = Runner(model, kv, BLOCK)
    tables = [list(range(each * blocks, (each + 1) * blocks)) for each in range(max(BATCHES))]
    tokens = served.prompt(CONTEXT, 1)
    for table in tables:
        runner.run([Rows(tokens[:-1], 0, table)])
    found = []
    watch = Watch()
    for batch in BATCHES:
        pieces = [Rows(tokens[-1:], CONTEXT - 1, table, logits=True) for table in tables[:batch]]
        taken_s = median_s([lambda given=pieces: runner.run(given)], steps)[0]  # type: ignore[misc]
        found.append(Figure(f"step, batch {batch}", 1e3 * taken_s, "ms"))
    watch.put_on(packed.PackedWeight, "_product", "products")
    watch.put_on(row_operations, "norm", "norms and gates")
    watch.put_on(row_operations, "gate", "norms and gates")
    watch.put_on(kv, "append", "attention")
    watch.put_on(kv, "attend", "attention")
    for batch in BATCHES:
        pieces = [Rows(tokens[-1:], CONTEXT - 1, table, logits=True) for table in tables[:batch]]
        watch.taken_s = dict.fromkeys(watch.taken_s, 0.0)
        started_s = time.perf_counter()
        for _ in range(steps):
            runner.run(pieces)
        whole_s = time.perf_counter() - started_s
        parts = {**watch.taken_s, "the rest": whole_s - sum(watch.taken_s.values())}
        found += [
            Figure(
                f"step, batch {batch}: {part}",
                1e3 * part_s / steps,
                "ms",
                "the step",
                1e3 * whole_s / steps,
            )
            for part, part_s in parts.items()
        ]
    return found


def main() -> None:
    asked = rig.options(__doc__.splitlines()[0] if __doc__ else "")
    if not packed.available():
        raise SystemExit(
            library.missing() or "this machine has no bf16 dot products: torch multiplies"
        )
    served, threads = rig.Served.load(), torch.get_num_threads()
    found = step_figures(served, QUICK_STEPS if asked.quick else STEPS)
    found = product_figures(load_spec(served.folder), threads, asked.quick) + found
    found += kept_figures(load_spec(served.folder), threads, asked.quick)
    rig.report("The model's arithmetic", found, asked.json)


if __name__ == "__main__":
    main()
