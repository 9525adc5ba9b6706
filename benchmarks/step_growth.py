"""How does a decode step's time grow: with the context, and with the rows? A line, or a curve?

Whole steps of the runner with the default model, logits included, over blocks of made-up numbers:

    context    1,024 to 32,768 tokens, one row and eight
    rows       1 to 32, with contexts of 1,024 tokens, and of 4,096

Points take turns in each repetition, so that what else the machine does meets all alike. Each
series gets a line by least squares of relative errors: what is left of a point beside its line says
whether it bends. Its slope stands beside what it cannot be less than: for a context, the bytes of
KV over the memory's rate; there is no such bound for rows, which share the weights. Contexts
together larger than the pool (1 GiB) share slots, in other orders.

    python benchmarks/step_growth.py [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

import rig
from kvass.common.block import BlockLayout
from kvass.common.kernels.paged import paged_kv
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import load_spec
from kvass.common.pool.memory import SlotMemory
from rig import Figure

BLOCK = 16
POOL_BYTES = 1 << 30
READ_BYTES = 512 << 20
CONTEXTS = (1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 20_480, 24_576, 28_672, 32_768)
QUICK_CONTEXTS = (1024, 4096, 8192, 16_384, 32_768)
ROWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)
QUICK_ROWS = (1, 2, 4, 8, 16, 32)
ROUNDS, QUICK_ROUNDS = 9, 3
STEPS = 3  # of a point in a round, of which the fastest counts: the others may have met a neighbour
RESIDUAL_MAX = 0.10  # a line: no point is further from it than this part of its own time


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of so many rows, each with a context of so many tokens."""

    rows: int
    context: int


@dataclass(frozen=True, slots=True)
class Series:
    """Points that differ in one thing."""

    name: str
    points: tuple[Point, ...]
    by_rows: bool

    @property
    def at(self) -> list[float]:
        """Rows, or thousands of tokens: 1,024 of them."""
        return [p.rows if self.by_rows else p.context / 1024 for p in self.points]

    @property
    def unit(self) -> str:
        return "row" if self.by_rows else "1,024 tokens"


@dataclass(frozen=True, slots=True)
class Line:
    """Milliseconds: `start + slope * x`. `residuals` are parts of what was measured."""

    start: float
    slope: float
    residuals: tuple[float, ...]
    r2: float

    @classmethod
    def through(cls, at: Sequence[float], taken: Sequence[float]) -> Line:
        """Fit with errors as parts of the values: the longest step must not decide alone."""
        x, y = np.array(at), np.array(taken)
        sides = np.stack([np.ones_like(x), x], 1) / y[:, None]
        start, slope = np.linalg.lstsq(sides, np.ones_like(y), rcond=None)[0]
        rest = y - (start + slope * x)
        r2 = 1 - float((rest**2).sum() / ((y - y.mean()) ** 2).sum())
        return cls(float(start), float(slope), tuple((rest / y).tolist()), r2)

    @property
    def worst(self) -> float:
        return max(map(abs, self.residuals))


class Steps:
    """A runner over a full pool. Immutable; the tokens that steps write are the same each time."""

    def __init__(self, served: rig.Served) -> None:
        spec = load_spec(served.folder)
        products = Products(uses())
        model = load_model(served.folder, spec, projection_of=products.projection)
        self.layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
        self.memory = SlotMemory(self.layout, POOL_BYTES // self.layout.block_size)
        generator = np.random.default_rng(1)
        for slot in self.memory.array:  # numbers near 1, and scales that are small
            slot[:] = generator.integers(0x20, 0x38, len(slot), dtype=np.uint8)
        kv = paged_kv(self.memory, self.layout, spec.heads)
        self._runner = Runner(model, kv, BLOCK)
        self._tokens = served.prompt(64, 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.layout.block_size // BLOCK

    def pieces(self, point: Point) -> list[Rows]:
        """Return a step's rows, whose blocks are all over the pool."""
        generator = torch.Generator().manual_seed(1)
        blocks, slots = point.context // BLOCK, self.memory.slots
        wanted = point.rows * blocks
        orders = [torch.randperm(slots, generator=generator) for _ in range(wanted // slots + 1)]
        tables = torch.cat(orders)[:wanted].view(point.rows, blocks).tolist()
        return [
            Rows([self._tokens[row]], point.context - 1, table, logits=True)
            for row, table in enumerate(tables)
        ]

    def taken_s(self, pieces: Sequence[Rows]) -> float:
        started_s = time.perf_counter()
        self._runner.run(pieces)
        return time.perf_counter() - started_s


def series(quick: bool) -> list[Series]:
    contexts, rows = (QUICK_CONTEXTS, QUICK_ROWS) if quick else (CONTEXTS, ROWS)
    by_context = [
        Series(
            f"context, {count} row{'s' * (count > 1)}",
            tuple(Point(count, c) for c in contexts),
            False,
        )
        for count in (1, 8)
    ]
    by_rows = [
        Series(f"rows, {context:,} tokens each", tuple(Point(r, context) for r in rows), True)
        for context in (1024, 4096)
    ]
    return by_context + by_rows


def measure(steps: Steps, points: Sequence[Point], rounds: int) -> dict[Point, float]:
    """Return each point's milliseconds: the median over rounds."""
    taken: dict[Point, list[float]] = {point: [] for point in points}
    for number in range(rounds + 1):
        for point, times in taken.items():
            pieces = steps.pieces(point)
            found_s = min(steps.taken_s(pieces) for _ in range(STEPS))
            if number:
                times.append(1e3 * found_s)
    return {point: median(times) for point, times in taken.items()}


def read_rate() -> float:
    """Return the GB/s that memory gives to all threads."""
    values = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    times = []
    for _ in range(7):
        started_s = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - started_s)
    return READ_BYTES / median(times) / 1e9


def figures_of(
    one: Series, line: Line, taken: dict[Point, float], least: float | None
) -> list[Figure]:
    """`least`: milliseconds that the slope cannot be less than."""
    first, last = one.points[0], one.points[-1]
    reference = "" if least is None else "reading its KV"
    return [
        Figure(f"{one.name}: step of the first point", taken[first], "ms"),
        Figure(f"{one.name}: of the last", taken[last], "ms"),
        Figure(f"{one.name}: the line's start", line.start, "ms"),
        Figure(f"{one.name}: … more for each {one.unit}", line.slope, "ms", reference, least),
        Figure(f"{one.name}: R²", line.r2, ""),
        Figure(
            f"{one.name}: furthest from the line", 100 * line.worst, "%", limit=100 * RESIDUAL_MAX
        ),
    ]


def plot(drawn: Sequence[tuple[Series, Line]], taken: dict[Point, float], path: Path) -> None:
    """Draw the points and their lines: contexts to the left, rows to the right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    whole, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for one, line in drawn:
        axis, at = axes[int(one.by_rows)], np.array(one.at)
        label = f"{one.name}: {line.start:.1f} + {line.slope:.2f} ms a {one.unit}"
        (dots,) = axis.plot(at, [taken[p] for p in one.points], "o", label=label)
        ends = np.array([0.0, at[-1]])
        axis.plot(ends, line.start + line.slope * ends, "--", color=dots.get_color(), alpha=0.6)
    for axis, what in zip(axes, ("context, thousands of tokens", "rows of a step"), strict=True):
        axis.set_xlabel(what)
        axis.set_ylabel("ms a step")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    whole.savefig(path)


def main() -> None:
    parser = rig.parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them there")
    given = parser.parse_args()
    steps = Steps(rig.Served.load())
    all_series = series(given.quick)
    points = list(dict.fromkeys(point for one in all_series for point in one.points))
    taken = measure(steps, points, QUICK_ROUNDS if given.quick else ROUNDS)
    rate = read_rate()
    found, drawn = [Figure("memory read", rate, "GB/s")], []
    for one in all_series:
        line = Line.through(one.at, [taken[point] for point in one.points])
        least = 1e3 * one.points[0].rows * 1024 * steps.token_bytes / (rate * 1e9)
        found += figures_of(one, line, taken, None if one.by_rows else least)
        drawn.append((one, line))
    if given.plot is not None:
        plot(drawn, taken, given.plot)
    rig.report("A step's time by context and rows", found, given.json)


if __name__ == "__main__":
    main()
