"""The prefill loop: admits jobs, steps their chunks, hands full blocks to their publishers.

Compute runs in the executor's one thread; state changes happen here, in the event loop, between
steps. A job's slots go back in `_retire`, once, when no step and none of the job's own tasks uses
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio
import anyio.lowlevel

from kvass.common.costs import Costs
from kvass.common.errors import KvassError, Unavailable
from kvass.common.executor import Executor
from kvass.common.model.runner import Rows
from kvass.prefill.job import Resolver, Run
from kvass.prefill.schedule import Job, Piece, Scheduler


class Steps(Protocol):
    """What computes a step: `common.model.runner.Runner`."""

    def run(self, pieces: Sequence[Rows]) -> object: ...


@dataclass(slots=True)
class Totals:
    """What the loop has done so far, for load reports and metrics."""

    steps: int = 0
    step_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """One job in the loop. Everything but `run` changes."""

    run: Run
    scope: anyio.CancelScope | None = None
    is_leaving: bool = False
    failure: KvassError | None = None


class PrefillLoop:
    """See the module. Mutable fields: `_tickets` (by job), `_wake`, `totals`, `on_step` (told the
    seconds of each step) and `on_served` (told of each job that ended well; both set once, by the
    worker)."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: Steps,
        executor: Executor,
        resolver: Resolver,
        costs: Costs,
    ) -> None:
        self.scheduler = scheduler
        self._steps = steps
        self._executor = executor
        self._resolver = resolver
        self._costs = costs
        self._tickets: dict[Job, Ticket] = {}
        self._wake = anyio.Event()
        self.totals = Totals()
        self.on_step: Callable[[float], None] = lambda step_s: None
        self.on_served: Callable[[Job], None] = lambda job: None

    def submit(self, run: Run) -> Ticket:
        """Queue a job."""
        ticket = Ticket(run)
        self._tickets[run.job] = ticket
        self.scheduler.add(run.job)
        self.totals.prompt_tokens += run.job.left_tokens
        self._wake.set()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """End a job now, in any state, any number of times: its compute stops after this chunk."""
        ticket.is_leaving = True
        if ticket.scope is not None:
            ticket.scope.cancel()
        elif not ticket.run.job.in_step:
            self._retire(ticket)

    async def run(self) -> None:
        """Step for ever; ends only by cancellation."""
        async with anyio.create_task_group() as tasks:
            while True:
                for job in self.scheduler.admit():
                    tasks.start_soon(self._resolve, self._tickets[job])
                pieces = self.scheduler.next_step()
                if pieces:
                    await self._step(pieces)
                    await anyio.lowlevel.checkpoint()  # let jobs settle and publish between steps
                else:
                    await self._wake.wait()
                    self._wake = anyio.Event()

    def wake(self) -> None:
        """Look again whether there is something to compute."""
        self._wake.set()

    async def _resolve(self, ticket: Ticket) -> None:
        if ticket.is_leaving:
            return  # it left, and was retired, before this task began
        job = ticket.run.job
        with anyio.CancelScope() as ticket.scope:
            try:
                await self._resolver.run(ticket.run)
            except KvassError as error:
                ticket.failure = error
        if not ticket.run.is_over:
            with anyio.move_on_after(1.0, shield=True):
                await self._resolver.release(job)
        else:
            self.on_served(job)
        ticket.scope = None
        ticket.is_leaving = True
        if not job.in_step:
            self._retire(ticket)

    async def _step(self, pieces: list[Piece]) -> None:
        rows = [_rows(piece) for piece in pieces]
        begun_s = anyio.current_time()
        try:
            await self._executor.run(lambda: self._steps.run(rows))
        except KvassError as error:
            self._fail(pieces, error)
            return
        self.totals.steps += 1
        self.totals.step_s = anyio.current_time() - begun_s
        self.on_step(self.totals.step_s)
        tokens = sum(piece.stop - piece.start for piece in pieces)
        self.totals.computed_tokens += tokens
        self._costs.prefilled(tokens, self.totals.step_s)
        for piece in pieces:
            self._account(piece)

    def _account(self, piece: Piece) -> None:
        job, ticket = piece.job, self._tickets[piece.job]
        self.scheduler.stepped(piece)
        if ticket.is_leaving and ticket.scope is None:
            self._retire(ticket)
            return
        ticket.run.publisher.publish(job.completed)
        job.completed = []
        ticket.run.move()

    def _fail(self, pieces: list[Piece], error: KvassError) -> None:
        """A step raised: its jobs end with the error; the others go on."""
        for piece in pieces:
            ticket = self._tickets[piece.job]
            piece.job.in_step = False
            ticket.failure = Unavailable(f"the prefill step failed: {error}")
            self.leave(ticket)

    def _retire(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.run.job, None) is None:
            return
        self.scheduler.finish(ticket.run.job)
        ticket.run.move()
        self._wake.set()


def _rows(piece: Piece) -> Rows:
    tokens = piece.job.request.tokens[piece.start : piece.stop]
    return Rows(tokens=tokens, start=piece.start, slots=list(piece.job.table.slots))
