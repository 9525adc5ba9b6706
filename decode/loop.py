"""The decode loop: admits requests, fetches their prompts, steps the batch, hands tokens out.

    submit ──> waiting ──> fetching (a task each) ──> running: step ─> step ─> … ──> over
                                                        │
                                                        └─> text, tokens ──> Ticket.take()

Compute runs in the executor's one thread; all state changes happen here, in the event loop, between
steps. Whatever ends a request (stop, cancel, error) ends in `_retire`, once, when neither a step
nor a pull uses its slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.lowlevel
import torch

from kvass.common.clock import Clock, RealClock
from kvass.common.costs import Costs
from kvass.common.errors import KvassError, Unavailable
from kvass.common.executor import Executor
from kvass.common.model.runner import Rows
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Delta
from kvass.decode.fetch import Fetcher
from kvass.decode.offer import Offerer
from kvass.decode.sampler import RowState, sample
from kvass.decode.schedule import Piece, Scheduler, Sequence
from kvass.decode.stream import TextStream

OVER_EARLY_MAX = 1024  # as many as one connection may have calls open
OFFER_BLOCKS = 8  # 128 tokens: seldom enough to cost a stream nothing, often enough to resume from


class Steps(Protocol):
    """What computes a step: `common.model.runner.Runner`."""

    def run(self, pieces: Many[Rows]) -> torch.Tensor | None: ...


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the loop. Everything but `sequence` changes.

    `delta` collects what the handler has not taken yet (at most `max_tokens` tokens); `changed` is
    set when it grows; `failure` is what ended the request instead of an answer.
    """

    sequence: Sequence
    row: RowState
    text: TextStream
    on_pulled: Callable[[], None]
    on_settled: Callable[[Collection[int]], None] = lambda indices: None
    prefill_over: anyio.Event = field(default_factory=anyio.Event)
    changed: anyio.Event = field(default_factory=anyio.Event)
    delta: Delta = field(default_factory=Delta)
    failure: KvassError | None = None
    fetch_scope: anyio.CancelScope | None = None
    is_leaving: bool = False

    @property
    def table(self) -> BlockTable:
        return self.sequence.table

    async def take(self) -> Delta:
        """Wait for tokens and return all there are; raises what ended the request early."""
        await self.changed.wait()
        if self.failure is not None:
            raise self.failure
        delta, self.delta = self.delta, Delta()
        self.changed = anyio.Event()
        return delta


@dataclass(slots=True)
class Totals:
    """What the loop has done so far, for load reports and metrics."""

    steps: int = 0
    step_s: float = 0.0  # the last step's time
    overhead_s: float = 0.0  # the part of it outside the executor
    rows: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    suspended: int = 0


class DecodeLoop:
    """See the module. Mutable fields: `_tickets` (by sequence), `_over_early` (ids that
    `prefill_over` named before their request was here, latest last), `_wake`, `totals`, `on_step`
    (told the seconds of each step; set once, by the worker)."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Steps,
        executor: Executor,
        fetcher: Fetcher,
        offerer: Offerer,
        costs: Costs,
        clock: Clock | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._steps = steps
        self._executor = executor
        self._fetcher = fetcher
        self._offerer = offerer
        self._costs = costs
        self._now_s = (clock or RealClock()).now_s  # steps are timed in the executor's thread too
        self._tickets: dict[Sequence, Ticket] = {}
        self._over_early: dict[str, None] = {}
        self._wake = anyio.Event()
        offerer.on_release = self.wake
        self.totals = Totals()
        self.on_step: Callable[[float], None] = lambda step_s: None

    def submit(self, ticket: Ticket) -> None:
        """Queue a request; the caller has checked that it fits the pool when it is alone."""
        self._tickets[ticket.sequence] = ticket
        request_id = ticket.sequence.request.request_id
        if request_id in self._over_early:
            del self._over_early[request_id]
            ticket.prefill_over.set()
        self.scheduler.add(ticket.sequence)
        self.totals.prompt_tokens += ticket.sequence.request.prompt_length
        self._wake.set()

    def leave(self, ticket: Ticket) -> None:
        """End a request now, in any state, any number of times: its compute stops after this
        step."""
        ticket.is_leaving = True
        if ticket.fetch_scope is not None:
            ticket.fetch_scope.cancel()
        elif not ticket.sequence.in_step:
            self._retire(ticket)

    def wake(self) -> None:
        """Look again whether something can be admitted or computed."""
        self._wake.set()

    def prefill_over(self, request_id: str) -> None:
        """No more blocks will come for the request of this id, which is here, was here, or comes
        in a moment: calls on one connection start in any order."""
        here = [t for t in self._tickets.values() if t.sequence.request.request_id == request_id]
        for ticket in here:
            ticket.prefill_over.set()
        if here:
            return
        self._over_early[request_id] = None
        if len(self._over_early) > OVER_EARLY_MAX:
            del self._over_early[next(iter(self._over_early))]

    async def run(self) -> None:
        """Step for ever; ends only by cancellation."""
        async with anyio.create_task_group() as tasks:
            while True:
                for sequence in self.scheduler.admit():
                    tasks.start_soon(self._fetch, self._tickets[sequence])
                suspended = len(self.scheduler.waiting)
                pieces = self.scheduler.next_step()
                self.totals.suspended += max(0, len(self.scheduler.waiting) - suspended)
                if pieces:
                    await self._step(pieces)
                    # Let fetches and handlers run between steps, also when steps never end.
                    await anyio.lowlevel.checkpoint()
                else:
                    await self._wake.wait()
                    self._wake = anyio.Event()

    async def _fetch(self, ticket: Ticket) -> None:
        if ticket.is_leaving:
            return  # it left, and was retired, before this task began
        with anyio.CancelScope() as ticket.fetch_scope:
            await self._fetcher.fetch(ticket, self.wake)
        ticket.fetch_scope = None
        if ticket.is_leaving:
            self._retire(ticket)
        else:
            self.scheduler.fetched(ticket.sequence)
            ticket.on_pulled()
        self._wake.set()

    async def _step(self, pieces: list[Piece]) -> None:
        started_s = self._now_s()
        rows = [_rows(piece) for piece in pieces]
        tickets = [self._tickets[piece.sequence] for piece in pieces]
        states = [t.row for t, piece in zip(tickets, pieces, strict=True) if piece.logits]

        def compute() -> tuple[list[int | None], float]:
            begun_s = self._now_s()
            logits = self._steps.run(rows)
            tokens = sample(logits, states) if logits is not None else []
            return tokens, self._now_s() - begun_s

        try:
            sampled, compute_s = await self._executor.run(compute)
        except KvassError as error:
            self._fail(tickets, str(error))
            return
        self._account(pieces, tickets, deque(sampled))
        self.totals.steps += 1
        self.totals.rows += sum(piece.stop - piece.start for piece in pieces)
        self.totals.step_s = self._now_s() - started_s
        self.on_step(self.totals.step_s)
        self.totals.overhead_s = self.totals.step_s - compute_s
        prompt_rows = sum(p.stop - p.start for p in pieces if p.stop - p.start > 1)
        self._costs.prefilled(prompt_rows, compute_s)

    def _account(
        self, pieces: list[Piece], tickets: list[Ticket], sampled: deque[int | None]
    ) -> None:
        for piece, ticket in zip(pieces, tickets, strict=True):
            token = sampled.popleft() if piece.logits else None
            self.scheduler.stepped(piece, token)
            if piece.logits and token is None:
                ticket.sequence.unoffered = []  # who knows what their KV is
                self._fail([ticket], "its logits are not finite")
                continue
            if token is not None and not ticket.is_leaving:
                self._hand_out(ticket, token)
            self._offer(ticket)
            if ticket.is_leaving or ticket.delta.finish_reason:
                self._retire(ticket)

    def _hand_out(self, ticket: Ticket, token: int) -> None:
        step = ticket.text.push(token)
        computed = tuple(ticket.sequence.computed) if step.finish_reason else ()
        ticket.delta = Delta(
            token_ids=(*ticket.delta.token_ids, token),
            text=ticket.delta.text + step.text,
            finish_reason=step.finish_reason,
            computed=computed,
            stop_reason=step.stop_reason,
        )
        ticket.changed.set()

    def _offer(self, ticket: Ticket, *, is_last: bool = False) -> None:
        """Offer the blocks computed here: in batches, and what is left when the request ends."""
        sequence = ticket.sequence
        if not sequence.unoffered or (len(sequence.unoffered) < OFFER_BLOCKS and not is_last):
            return
        table, tenant = sequence.table, sequence.request.tenant
        # Suspended meanwhile, it has other slots, and some blocks are not in them yet.
        indices = [index for index in sequence.unoffered if table.ready[index]]
        slots = [table.slots[index] for index in indices]
        self._offerer.offer(table.chain, indices, slots, tenant)
        sequence.unoffered = []

    def _fail(self, tickets: list[Ticket], error: str) -> None:
        """A step went wrong for these requests: they end with the error; the others go on."""
        for ticket in tickets:
            ticket.sequence.in_step = False
            ticket.failure = Unavailable(f"the decode step failed: {error}")
            ticket.changed.set()
            self._retire(ticket)

    def _retire(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.sequence, None) is None:
            return
        if ticket.sequence.state != "waiting":
            self._offer(ticket, is_last=True)
        self.totals.computed_tokens += sum(b - a for a, b in ticket.sequence.computed)
        self.scheduler.finish(ticket.sequence)
        self._wake.set()

    def waiting_tokens(self) -> int:
        """Return how many prompt tokens are queued or not computed yet."""
        sequences = [*self.scheduler.waiting, *self.scheduler.admitted]
        return sum(max(0, len(s.tokens) - 1 - s.table.frontier) for s in sequences)


def _rows(piece: Piece) -> Rows:
    sequence = piece.sequence
    return Rows(
        tokens=sequence.tokens[piece.start : piece.stop],
        start=piece.start,
        slots=list(sequence.table.slots),
        write=piece.write,
        logits=piece.logits,
    )
