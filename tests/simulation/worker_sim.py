"""Prefill and decode loops over a simulated store, with a model that notices every wrong byte."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.abc
import tokenizers
from prometheus_client import CollectorRegistry

from hash_model import BLOCK, VOCABULARY, HashModel
from kvass.common.costs import Costs
from kvass.common.metrics import BlockMetrics, WorkerMetrics
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Generate, Prefill, PrefillProgress, Sampling, Stop
from kvass.common.worker import watch
from kvass.decode.fetch import Fetcher
from kvass.decode.loop import DecodeLoop, Ticket
from kvass.decode.offer import Offerer
from kvass.decode.sampler import RowState
from kvass.decode.schedule import Scheduler
from kvass.decode.schedule import Sequence as DecodeSequence
from kvass.decode.stream import TextStream
from kvass.kvstore.client.holds import unhold
from kvass.prefill.job import Resolver, Run
from kvass.prefill.loop import PrefillLoop
from kvass.prefill.publish import Publisher
from kvass.prefill.schedule import Job, due_s
from kvass.prefill.schedule import Scheduler as PrefillScheduler
from store_sim import LAYOUT, Cluster, Worker, chain_from

CLAIM_S = 2.0
T = TypeVar("T")


class SlowExecutor:
    """Takes `step_s` of virtual time a call, and cannot be interrupted, like a real step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def run(self, function: Callable[[], T]) -> T:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(self._step_s)
        return function()


@functools.cache
def tokenizer() -> Tokenizer:
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    return Tokenizer(tokenizers.Tokenizer(model), eos_token_ids=())


@dataclass
class Prefiller:
    """A prefill worker without its process. `not_stored`: what its last job says of that."""

    worker: Worker
    pool: BlockPool
    model: HashModel
    loop: PrefillLoop
    not_stored: str = ""

    async def prefill(self, tokens: Sequence[int], name: str, salt: bytes = b"") -> PrefillProgress:
        """Run a job to its end; cancelling ends it as a lost connection would."""
        request = Prefill(
            job_id=name, tokens=tuple(tokens), hold_owner=name, deadline_s=60.0, salt=salt
        )
        chain = chain_from(tokens, salt)
        assert chain.keys, "the gateway sends no job without a full block"
        table = BlockTable(self.pool, chain)
        job = Job(request, table, due_s(request, anyio.current_time()))
        run = Run(job, Publisher(self.worker.store, request, table), self.loop.wake)
        ticket = self.loop.submit(run)
        try:
            while not run.is_over:
                moved = run.moved
                if ticket.failure is not None:
                    raise ticket.failure
                await moved.wait()
            self.not_stored = run.not_stored()
            return run.progress()
        finally:
            self.loop.leave(ticket)


@dataclass
class Decoder:
    """A decode worker without its process."""

    worker: Worker
    pool: BlockPool
    model: HashModel
    loop: DecodeLoop
    tasks: anyio.abc.TaskGroup

    def ticket(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        name: str,
        prefill_pending: bool = False,
        salt: bytes = b"",
    ) -> Ticket:
        request = Generate(
            request_id=name,
            tokens=tuple(prompt),
            prompt_length=len(prompt),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=count),
            deadline_s=60.0,
            prefill_pending=prefill_pending,
            hold_owner=name,
        )
        store = self.worker.store

        def release() -> None:
            self.tasks.start_soon(store.release_hold, name)

        table = BlockTable(self.pool, chain_from(prompt, salt))
        ticket = Ticket(
            sequence=DecodeSequence(request, table, list(prompt)),
            row=RowState(request.sampling, request.stop, prompt=prompt, eos_token_ids=()),
            text=TextStream(tokenizer(), prompt, request.stop, frozenset()),
            on_settled=lambda indices: unhold(store.router, name, table.chain, indices),
            on_pulled=release,
        )
        if not prefill_pending:
            ticket.prefill_over.set()
        return ticket

    async def answer(self, ticket: Ticket) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Return the tokens and the prompt ranges that decode computed."""
        self.loop.submit(ticket)
        tokens: list[int] = []
        try:
            while True:
                delta = await ticket.take()
                tokens += delta.token_ids
                if delta.finish_reason:
                    return tokens, delta.computed
        finally:
            self.loop.leave(ticket)


def add_prefiller(
    sim: Cluster,
    name: str = "prefill-0",
    *,
    slots: int = 64,
    step_s: float = 0.01,
    batch: int = 4,
    registry: CollectorRegistry | None = None,
    tasks: anyio.abc.TaskGroup | None = None,
) -> Prefiller:
    """Start a prefill worker; in `tasks`, if it is to die before the cluster does."""
    registry, tasks = registry or CollectorRegistry(), tasks or sim.tasks
    worker = sim.add_worker(name, tasks=tasks, slots=slots, metrics=BlockMetrics(registry))
    pool = BlockPool(slots)
    costs = Costs(tokens_per_s=1.0)  # so slow that loading always pays
    scheduler = PrefillScheduler(chunk_tokens=4 * BLOCK, batch_requests=batch)
    resolver = Resolver(worker.store, costs, LAYOUT.block_size, CLAIM_S)
    model = HashModel(worker.memory)
    loop = PrefillLoop(scheduler, model, SlowExecutor(step_s), resolver, costs)
    watch(
        WorkerMetrics(registry),
        pool,
        loop,
        running=lambda: scheduler.running,
        waiting=lambda: scheduler.waiting,
    )
    tasks.start_soon(loop.run)
    return Prefiller(worker, pool, model, loop)


def add_decoder(
    sim: Cluster,
    name: str = "decode-0",
    *,
    slots: int = 64,
    step_s: float = 0.005,
    registry: CollectorRegistry | None = None,
) -> Decoder:
    """Start a decode worker."""
    registry = registry or CollectorRegistry()
    worker = sim.add_worker(name, slots=slots, metrics=BlockMetrics(registry))
    pool = BlockPool(slots)
    costs = Costs(tokens_per_s=1.0)
    scheduler = Scheduler(pool, chunk_tokens=4 * BLOCK, batch_requests=4)
    model = HashModel(worker.memory)
    offerer = Offerer(worker.store, pool)
    fetcher = Fetcher(worker.store, costs, LAYOUT.block_size)
    loop = DecodeLoop(scheduler, model, SlowExecutor(step_s), fetcher, offerer, costs)
    watch(
        WorkerMetrics(registry),
        pool,
        loop,
        running=lambda: scheduler.admitted,
        waiting=lambda: scheduler.waiting,
    )
    sim.tasks.start_soon(offerer.run)
    sim.tasks.start_soon(loop.run)
    return Decoder(worker, pool, model, loop, sim.tasks)
