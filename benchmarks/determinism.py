"""What does it cost that a row's bits never depend on its company?

    as served    products of row counts that were shown to be safe, attention in a fixed key tile
                 with aligned rows
    any counts   the same code with as many rows as there are, in products and in attention
    dense sdpa   products of as many rows as there are, and torch's own fused attention over dense
                 bf16 KV: no pages, no fixed tile (and no quantisation)

Decode steps at a context of 512 and a prefill of 1,024 tokens in chunks of 512, one variant after
the other in each repetition, so that what else the machine does meets all alike. Then what two
choices rest on: one thread for steps of few rows (`runner.FEW_ROWS`), and how torch's threads wait
(OMP_WAIT_POLICY, in processes of their own). Values are medians.

    python benchmarks/determinism.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import rig
from kvass.common.block import BlockLayout
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import ModelSpec, load_spec
from kvass.common.pool.memory import SlotMemory
from rig import Figure

CONTEXT, PROMPT, CHUNK, BLOCK = 512, 1024, 512, 16
BATCHES = (1, 8, 32)
FEW = (1, 2, 3, 4)
TABLE_BLOCKS = PROMPT // BLOCK
REPETITIONS, QUICK_REPETITIONS = 15, 3
SERVED, ANY, DENSE = "as served", "any counts", "dense sdpa"
WAITS = ("active", "passive")
PROBE = "--probe"  # what this program is called with to measure under another environment


class DensePlan:
    """A step's rows. `requests` int64 [N] are their places in the dense memory."""

    def __init__(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> None:
        self.requests = (tables[:, 0] // TABLE_BLOCKS)[row_table]
        self.positions = row_position
        self.is_one_request = len(tables) == 1
        stop = int(row_position.max()) + 1
        later = torch.arange(stop) > row_position[:, None]
        self.stop = stop
        self.bias = torch.zeros(later.shape, dtype=torch.bfloat16).masked_fill_(
            later, float("-inf")
        )


class DenseKv:
    """bf16 KV of each request in one piece, read by torch's attention; tables are consecutive.

    Mutable field: `memory` [layers, K|V, requests, H, tokens, D].
    """

    def __init__(self, spec: ModelSpec, requests: int) -> None:
        size = (spec.layers, 2, requests, spec.kv_heads, PROMPT, spec.head_dim)
        self.memory = torch.full(size, 0.1, dtype=torch.bfloat16)

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> DensePlan:
        return DensePlan(tables, row_table, row_position)

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        requests, blocks = slots // TABLE_BLOCKS, slots % TABLE_BLOCKS
        positions = blocks * BLOCK + offsets
        for part, rows in enumerate((k, v)):
            self.memory[layer, part][requests, :, positions] = rows.to(torch.bfloat16)

    def attend(self, layer: int, q: torch.Tensor, plan: DensePlan) -> torch.Tensor:
        queries = q.to(torch.bfloat16)
        if plan.is_one_request:
            request = int(plan.requests[0])
            k, v = self.memory[layer, :, request : request + 1, :, : plan.stop]
            out = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], k, v, attn_mask=plan.bias, enable_gqa=True
            )
            return out[0].transpose(0, 1).float()
        k, v = self.memory[layer][:, : len(queries), :, : plan.stop]
        bias = plan.bias[:, None, None]
        out = F.scaled_dot_product_attention(
            queries[:, :, None], k, v, attn_mask=bias, enable_gqa=True
        )
        return out[:, :, 0].float()


def runners(folder: Path) -> dict[str, Runner]:
    """Put the variants together; what they write is the same, so the paged ones share memory."""
    spec = load_spec(folder)
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, "fp8")
    safe = load_model(folder, spec, projection_of=Products(uses()).projection)
    free = load_model(folder, spec)
    memory = SlotMemory(layout, max(BATCHES) * TABLE_BLOCKS)
    memory.array.fill(0x22)  # some number: untouched pages are all one page, and read too fast
    aligned = TorchPagedKv(memory, layout, spec.heads)
    loose = TorchPagedKv(memory, layout, spec.heads)
    loose.shape = replace(loose.shape, row_alignment=1)
    return {
        SERVED: Runner(safe, aligned, BLOCK),
        ANY: Runner(free, loose, BLOCK),
        DENSE: Runner(free, DenseKv(spec, max(BATCHES)), BLOCK),
    }


def tokens_at(start: int, stop: int) -> list[int]:
    return [(977 * position + 5) % 40_000 for position in range(start, stop)]


def table(request: int) -> list[int]:
    return list(range(request * TABLE_BLOCKS, (request + 1) * TABLE_BLOCKS))


def prefill(runner: Runner) -> None:
    for start in range(0, PROMPT, CHUNK):
        tokens = tokens_at(start, start + CHUNK)
        runner.run([Rows(tokens, start, table(0), logits=start + CHUNK == PROMPT)])


def step(runner: Runner, batch: int) -> None:
    token = tokens_at(CONTEXT - 1, CONTEXT)
    runner.run([Rows(token, CONTEXT - 1, table(each), logits=True) for each in range(batch)])


def timed_ms(action: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - started_s)


Times = dict[tuple[str, str], list[float]]


def measure(variants: dict[str, Runner], repetitions: int) -> Times:
    """Return milliseconds by (what, variant); the first repetition warms up."""
    times: Times = defaultdict(list)
    for repetition in range(repetitions + 1):
        for name, runner in variants.items():
            found = {f"prefill of {PROMPT:,} tokens": timed_ms(partial(prefill, runner))}
            for batch in BATCHES:
                found[f"decode step, batch {batch}"] = timed_ms(partial(step, runner, batch))
            if repetition:
                for what, value in found.items():
                    times[what, name].append(value)
    return times


def few_rows(runner: Runner, repetitions: int) -> Times:
    """Steps of few rows on one thread and on all of them, whatever the runner would choose."""
    times: Times = defaultdict(list)
    threads = torch.get_num_threads()
    for repetition in range(repetitions + 1):
        for rows in FEW:
            for used, name in ((1, "one thread"), (threads, "all threads")):
                torch.set_num_threads(used)
                runner._threads = used
                value = timed_ms(partial(step, runner, rows))
                if repetition:
                    times[f"step of {rows} rows", name].append(value)
    runner._threads = threads
    torch.set_num_threads(threads)
    return times


def waiting(repetitions: int) -> Times:
    """The served variant's times in a process whose threads wait so."""
    times: Times = defaultdict(list)
    for policy in WAITS:
        command = [sys.executable, __file__, PROBE, str(repetitions)]
        environment = os.environ | {"OMP_WAIT_POLICY": policy}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for what, values in json.loads(done.stdout).items():
            times[what, f"threads wait {policy}ly"] = values
    return times


def probe(repetitions: int) -> None:
    """Print the served variant's times as JSON: `waiting` asks for it."""
    served = {SERVED: runners(rig.Served.load().folder)[SERVED]}
    times = measure(served, repetitions)
    print(json.dumps({what: values for (what, _), values in times.items()}))


def compared(times: Times, ours: str, others: Sequence[str]) -> list[Figure]:
    """Return `ours` beside each of the others, for everything that was measured."""
    return [
        Figure(
            name=f"{what}, {ours}",
            value=median(times[what, ours]),
            unit="ms",
            reference=other,
            reference_value=median(times[what, other]),
        )
        for what in dict.fromkeys(what for what, _ in times)
        for other in others
    ]


def main() -> None:
    if PROBE in sys.argv:
        probe(int(sys.argv[-1]))
        return
    asked = rig.options((__doc__ or "").splitlines()[0])
    repetitions = QUICK_REPETITIONS if asked.quick else REPETITIONS
    variants = runners(rig.Served.load().folder)
    found = compared(measure(variants, repetitions), SERVED, (ANY, DENSE))
    found += compared(few_rows(variants[SERVED], repetitions), "one thread", ["all threads"])
    found += compared(waiting(repetitions), *_waits())
    rig.report("Cost of determinism", found, asked.json)


def _waits() -> tuple[str, list[str]]:
    first, second = (f"threads wait {policy}ly" for policy in WAITS)
    return first, [second]


if __name__ == "__main__":
    main()
