"""How long is a decode step outside the model's forward pass?

The decode loop of a worker with its engine, scheduler, sampler and text streams, and no network:
requests of 512 prompt tokens, each with a reader that takes its tokens as a handler does. Outside
is everything from the end of one forward pass to the beginning of the next:

    rows, plan   tensors of the step's rows, and how its attention is cut
    sample       logits to tokens
    hand over    to the compute thread and back
    the rest     accounting, text, readers, choosing the next step's rows

Greedy requests and sampled ones (temperature 0.8, top_p 0.95). Values are medians over steps.

    python benchmarks/decode_step.py [--quick] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar, cast

import anyio
import torch

import rig
from kvass.common import config as configuration
from kvass.common.costs import Costs
from kvass.common.executor import ThreadExecutor
from kvass.common.keys import Chain
from kvass.common.model.engine import Engine, open_engine
from kvass.common.model.load import Model
from kvass.common.model.runner import Rows, Runner
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Sampling, Stop
from kvass.decode.fetch import Fetcher
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.offer import Offerer
from kvass.decode.sampler import RowState
from kvass.decode.schedule import Scheduler
from kvass.decode.schedule import Sequence as Decoding
from kvass.decode.stream import TextStream
from kvass.kvstore.client.store import StoreClient
from rig import Figure

T = TypeVar("T")
PROMPT_TOKENS = 512
STEPS, QUICK_STEPS = 200, 40
LIMITS_MS = {1: 1.5, 8: 3.0}
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)
GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class Step:
    """When each part of one step began and ended, in seconds of one clock. All fields change."""

    rows: int = 0
    asked_s: float = 0.0
    compute_s: float = 0.0
    run_s: float = 0.0
    forward_s: float = 0.0
    forward_end_s: float = 0.0
    run_end_s: float = 0.0
    compute_end_s: float = 0.0
    answered_s: float = 0.0


@dataclass(slots=True)
class Watch:
    """Notes when things happen, for the three it stands in for. Mutable field: `steps`."""

    model: Model
    runner: Runner
    executor: ThreadExecutor
    steps: list[Step] = field(default_factory=list)

    @property
    def is_packed(self) -> bool:
        return self.model.is_packed

    @property
    def spec(self) -> Any:
        return self.model.spec

    def forward(self, *arguments: Any) -> torch.Tensor | None:
        step = self.steps[-1]
        step.forward_s = time.perf_counter()
        logits = self.model.forward(*arguments)
        step.forward_end_s = time.perf_counter()
        return logits


class WatchedSteps:
    """The runner, as the loop sees it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        step = self._watch.steps[-1]
        step.rows = sum(len(piece.tokens) for piece in pieces)
        step.run_s = time.perf_counter()
        logits = self._watch.runner.run(pieces)
        step.run_end_s = time.perf_counter()
        return logits


class WatchedExecutor:
    """The compute thread, as the loop sees it."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    async def run(self, function: Callable[[], T]) -> T:
        step = Step()
        self._watch.steps.append(step)

        def timed() -> T:
            step.compute_s = time.perf_counter()
            result = function()
            step.compute_end_s = time.perf_counter()
            return result

        step.asked_s = time.perf_counter()
        result = await self._watch.executor.run(timed)
        step.answered_s = time.perf_counter()
        return result


class NoFetcher:
    """Nothing comes from a store: the loop computes its prompts."""

    async def fetch(self, ticket: object, wake: object) -> None:
        return None


def ticket_of(
    engine: Engine, served: rig.Served, sampling: Sampling, seed: int, most: int
) -> Ticket:
    tokens = served.prompt(PROMPT_TOKENS, seed)
    stop = Stop(max_tokens=most, ignore_eos=True)
    chain = Chain(engine.namespace, engine.layout.block_tokens)
    chain.extend(tokens)
    request = Generate(
        request_id=f"bench-{seed}",
        tokens=tuple(tokens),
        prompt_length=len(tokens),
        sampling=sampling,
        stop=stop,
        deadline_s=600.0,
    )
    ticket = Ticket(
        sequence=Decoding(request, BlockTable(engine.pool, chain), list(tokens)),
        row=RowState(sampling, stop, prompt=tokens, eos_token_ids=()),
        text=TextStream(served.tokenizer, tokens, stop, frozenset()),
        on_pulled=lambda: None,
    )
    ticket.prefill_over.set()
    return ticket


async def decode(
    engine: Engine, served: rig.Served, watch: Watch, sampling: Sampling, batch: int, steps: int
) -> list[Step]:
    """Run so many requests together; return the steps in which each gave one row."""
    watch.steps.clear()
    costs = Costs(engine.tokens_per_s)
    scheduler = Scheduler(engine.pool, chunk_tokens=512, batch_requests=batch)
    offerer = Offerer(cast(StoreClient, None), engine.pool)  # what it is offered, it keeps
    loop = DecodeLoop(
        scheduler,
        WatchedSteps(watch),
        WatchedExecutor(watch),
        cast(Fetcher, NoFetcher()),
        offerer,
        costs,
    )

    async def read(ticket: Ticket) -> None:
        while not (await ticket.take()).finish_reason:
            pass

    seeds = range(1000 * batch, 1000 * batch + batch)
    tickets = [ticket_of(engine, served, sampling, seed, steps) for seed in seeds]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(loop.run)
        async with anyio.create_task_group() as readers:
            for ticket in tickets:
                loop.submit(ticket)
                readers.start_soon(read, ticket)
        tasks.cancel_scope.cancel()
    return list(watch.steps)


def figures(name: str, batch: int, steps: Sequence[Step]) -> list[Figure]:
    """Take the medians over pairs of steps that follow each other with nothing but single rows."""
    pairs = [(one, two) for one, two in pairwise(steps) if one.rows == two.rows == batch][2:]
    parts: dict[str, list[float]] = {
        "outside the forward pass": [two.forward_s - one.forward_end_s for one, two in pairs],
        "rows, plan": [s.forward_s - s.run_s + s.run_end_s - s.forward_end_s for s, _ in pairs],
        "sample": [s.compute_end_s - s.run_end_s for s, _ in pairs],
        "hand over": [s.compute_s - s.asked_s + s.answered_s - s.compute_end_s for s, _ in pairs],
        "the rest": [two.asked_s - one.answered_s for one, two in pairs],
    }
    forward_ms = 1e3 * median(s.forward_end_s - s.forward_s for s, _ in pairs)
    return [
        Figure(
            name=f"{name}, batch {batch}: {part}",
            value=1e3 * median(values),
            unit="ms",
            reference="forward pass" if part.startswith("outside") else "",
            reference_value=forward_ms if part.startswith("outside") else None,
            limit=LIMITS_MS[batch] if part.startswith("outside") else None,
        )
        for part, values in parts.items()
    ]


async def measure(served: rig.Served, steps: int) -> list[Figure]:
    config = configuration.load(
        None, [f"cluster.model={str(served.folder)!r}", "decode.pool_blocks=1200"]
    )
    executor = ThreadExecutor("kvass-compute")
    try:
        engine = await executor.run(lambda: open_engine(config, config.decode, "decode"))
        watch = Watch(engine.runner._model, engine.runner, executor)
        engine.runner._model = cast(Model, watch)
        found: list[Figure] = []
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            for batch in LIMITS_MS:
                done = await decode(engine, served, watch, sampling, batch, steps)
                found += figures(name, batch, done)
        return found
    finally:
        executor.close()


def main() -> None:
    asked = rig.options(__doc__.splitlines()[0] if __doc__ else "")
    served = rig.Served.load()
    found = anyio.run(measure, served, QUICK_STEPS if asked.quick else STEPS)
    rig.report("A decode step outside the forward pass", found, asked.json)


if __name__ == "__main__":
    main()
