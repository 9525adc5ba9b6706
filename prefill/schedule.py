"""Which chunks each prefill step computes, and which jobs have slots. Pure: no I/O, no clock, no
torch.

    waiting ──admit──> running: resolved block by block (prefill/job.py), computed chunk by chunk
    ──> over

A job computes whole blocks only, in chain order, and only those that are its own to compute
(claimed, or not worth loading); where the next block's fate is open, it waits and others have the
step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvass.common.pool.table import BlockTable
from kvass.common.wire import Prefill, Range

State = Literal["waiting", "running", "over"]

# One priority level is worth this much waiting: a low-priority job overtakes after that (ageing).
PRIORITY_S = 10.0


@dataclass(slots=True, eq=False)
class Job:
    """One prefill job as the scheduler sees it. Everything but `request` and `due_s` changes.

    `ours` says for each block whether this job is to compute it; `completed` lists blocks whose KV
    was just computed and that nobody has pushed yet; `computed` collects token ranges.
    """

    request: Prefill
    table: BlockTable
    due_s: float
    ours: list[bool] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    computed: list[Range] = field(default_factory=list)
    state: State = "waiting"
    in_step: bool = False

    @property
    def block_count(self) -> int:
        return len(self.table.chain.keys)

    @property
    def left_tokens(self) -> int:
        """Upper bound of the tokens that are still to compute."""
        blocks = len(self.table.missing) if self.state == "running" else self.block_count
        return blocks * self.table.block_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """Token rows [start, stop) of one job: whole blocks."""

    job: Job
    start: int
    stop: int


def due_s(request: Prefill, now_s: float) -> float:
    """Return when a job is due: sooner means earlier in every step."""
    return min(now_s + PRIORITY_S * request.priority, now_s + request.deadline_s)


class Scheduler:
    """Admission and steps. Mutable fields: `waiting` (by due time), `running` (by due time)."""

    def __init__(self, *, chunk_tokens: int, batch_requests: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.batch_requests = batch_requests
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def left_tokens(self) -> int:
        """Return an upper bound of the tokens that all jobs here have still to compute."""
        return sum(job.left_tokens for job in (*self.waiting, *self.running))

    def add(self, job: Job) -> None:
        """Queue a job in order of its due time."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].due_s > job.due_s:
            place -= 1
        self.waiting.insert(place, job)

    def admit(self) -> list[Job]:
        """Give waiting jobs slots for all their blocks, in order, as far as they go."""
        entered = []
        while self.waiting and len(self.running) < self.batch_requests:
            job = self.waiting[0]
            if not job.table.open(job.block_count * job.table.block_tokens, spare=0):
                break
            self.waiting.popleft()
            job.state = "running"
            job.ours = [False] * job.block_count
            self.running.append(job)
            self.running.sort(key=lambda running: running.due_s)
            entered.append(job)
        return entered

    def next_step(self) -> list[Piece]:
        """Choose chunks up to the token budget, the most urgent jobs first."""
        pieces = []
        budget = self.chunk_tokens
        for job in self.running:
            piece = self._piece(job, budget)
            if piece is not None:
                job.in_step = True
                budget -= piece.stop - piece.start
                pieces.append(piece)
        return pieces

    def stepped(self, piece: Piece) -> None:
        """Account for a computed piece: its blocks are in the pool and may be pushed."""
        job = piece.job
        job.in_step = False
        job.completed += job.table.computed(piece.stop)
        start = piece.start
        if job.computed and job.computed[-1][1] == start:
            start = job.computed.pop()[0]
        job.computed.append((start, piece.stop))

    def finish(self, job: Job) -> None:
        """End a job in any state, any number of times; not while it is `in_step`."""
        assert not job.in_step, "a step still writes these slots"
        if job.state == "waiting":
            self.waiting.remove(job)
        elif job.state == "running":
            self.running.remove(job)
            job.table.close()
        job.state = "over"

    def _piece(self, job: Job, budget: int) -> Piece | None:
        table = job.table
        table.advance()
        first = table.frontier // table.block_tokens
        most = min(job.block_count, first + budget // table.block_tokens)
        stop = first
        while stop < most and job.ours[stop] and not table.ready[stop]:
            stop += 1
        if stop == first:
            return None
        return Piece(job, first * table.block_tokens, stop * table.block_tokens)
