"""What this machine can do at most, and whether it was ours alone meanwhile.

Limits are measured in the same run as what is held to them: how fast two threads read memory, and
how fast torch multiplies by the default model's weights. Quiet means that other processes took next
to no time of a core; ours are this process and all that descend from it. It refuses to know what is
measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import torch
from torch.nn import functional

from kvass.common.model.spec import ModelSpec

T = TypeVar("T")
READ_BYTES = 1 << 30  # far more than any cache holds
READERS = 2
TIMES = 7
OTHERS_MAX = 0.05  # of a core: half a core of other load ruins a row
# The kernel counts /proc/stat by ticks and processes by the clock: over less time than this the
# difference alone is more than OTHERS_MAX.
TICKS_MAX = 5
TRIES = 3  # for each row that is wanted
LOOK_S, LOOKS_MAX = 0.5, 60
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


# --- limits ---------------------------------------------------------------------------------------


def read_bytes_per_s() -> float:
    """Return how many bytes a second two threads read from memory: sums over 1 GiB."""
    numbers = torch.ones(READ_BYTES // 4)
    before = torch.get_num_threads()
    torch.set_num_threads(READERS)
    try:
        return READ_BYTES / _least_s(numbers.sum)
    finally:
        torch.set_num_threads(before)


def multiplied_flop_per_s(spec: ModelSpec, rows: int) -> float:
    """Return how many operations a second torch's bf16 products take with one layer's weights."""
    matrices = [torch.randn(size, dtype=torch.bfloat16) for size in _matrices(spec)]
    inputs = {matrix.shape[1]: torch.randn(rows, matrix.shape[1]) for matrix in matrices}
    inputs = {width: value.to(torch.bfloat16) for width, value in inputs.items()}
    calls = [partial(functional.linear, inputs[each.shape[1]], each) for each in matrices]

    def layer() -> None:
        for call in calls:
            call()

    return 2.0 * rows * sum(each.numel() for each in matrices) / _least_s(layer, 3 * TIMES)


def prefill_flop(spec: ModelSpec, tokens: int) -> float:
    """Return the operations of one prompt in layers and causal attention, as bf16 products."""
    weights = sum(rows * columns for rows, columns in _matrices(spec))
    pairs = tokens * (tokens + 1) / 2
    attention = 2 * 2.0 * pairs * spec.heads * spec.head_dim
    return spec.layers * (2.0 * tokens * weights + attention)


def _matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return the shapes of one layer's weights."""
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    around = [(query, hidden), (key, hidden), (key, hidden), (hidden, query)]
    return [*around, (inner, hidden), (inner, hidden), (hidden, inner)]


def _least_s(call: Callable[[], object], times: int = TIMES) -> float:
    """Return the shortest time: what takes longer was held up by somebody."""
    call()
    found = []
    for _ in range(times):
        started_s = time.perf_counter()
        call()
        found.append(time.perf_counter() - started_s)
    return min(found)


# --- quiet ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """The time that all processors were busy, and that each of our processes took, in ticks."""

    at_s: float
    busy: int
    ours: Counter[int]

    @classmethod
    def now(cls) -> Moment:
        """Look at /proc. Time that the host took away counts as busy: it is nobody's of ours."""
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, hard, soft, stolen = map(int, words)
        parents, ticks = dict[int, int](), Counter[int]()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended; its parent has its time
            process = int(folder.name)
            parents[process] = int(fields[1])
            # Its own time and that of its children which it has waited for.
            ticks[process] = sum(map(int, fields[11:15]))
        ours = {process for process in parents if _descends(process, parents)}
        kept = Counter({process: ticks[process] for process in ours})
        return cls(time.monotonic(), user + nice + system + hard + soft + stolen, kept)

    def others_since(self, earlier: Moment) -> float:
        """Return the cores that others used since then, on average; 0 where it is too little."""
        ours = sum((self.ours - earlier.ours).values())
        others = self.busy - earlier.busy - ours
        return 0.0 if others <= TICKS_MAX else others * TICK_S / (self.at_s - earlier.at_s)


def _descends(process: int, parents: dict[int, int]) -> bool:
    for _ in range(len(parents)):  # bound: a chain names no process twice
        if process == os.getpid():
            return True
        process = parents.get(process, 0)
    return False


@dataclass(slots=True)
class Quiet:
    """Repeats what others disturbed. Mutable: `complaints`, what stayed disturbed."""

    complaints: list[str]

    async def rows(self, what: str, count: int, once: Callable[[], Awaitable[T]]) -> list[T]:
        """Return `count` quiet rows; after TRIES times as many the quietest, with a complaint."""
        found: list[tuple[float, T]] = []
        for _ in range(TRIES * count):
            if sum(others <= OTHERS_MAX for others, _ in found) == count:
                break
            await _until_quiet()
            before = Moment.now()
            row = await once()
            others = Moment.now().others_since(before)
            found.append((others, row))
            if others > OTHERS_MAX:
                print(f"{what}: not counted, others took {others:.2f} cores", file=sys.stderr)
        found.sort(key=lambda pair: pair[0])
        loud = sum(others > OTHERS_MAX for others, _ in found[:count])
        if loud:
            self.complaints.append(
                f"{what}: {loud} of {count} rows are not quiet, after {len(found)} tries"
            )
        return [row for _, row in found[:count]]


async def _until_quiet() -> None:
    """Wait for others to pause, a while at most: then the row itself will tell."""
    for _ in range(LOOKS_MAX):
        before = Moment.now()
        await anyio.sleep(LOOK_S)
        if Moment.now().others_since(before) <= OTHERS_MAX:
            return
