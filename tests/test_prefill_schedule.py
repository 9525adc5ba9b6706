"""The prefill scheduler against a model: whole blocks in chain order, only what is the job's own,
never beyond the budget, urgent jobs first, and every slot comes back."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.keys import Chain, Namespace
from kvass.common.pool.pool import BlockPool
from kvass.common.pool.table import BlockTable
from kvass.common.wire import Prefill
from kvass.prefill.schedule import PRIORITY_S, Job, Scheduler, due_s

BLOCK = 4
SLOTS = 12
CHUNK = 10  # two blocks and a half


def make_job(pool: BlockPool, tokens: list[int], name: str, due: float) -> Job:
    chain = Chain(Namespace(bytes(32)), BLOCK)
    chain.extend(tokens)
    request = Prefill(job_id=name, tokens=tuple(tokens), hold_owner="", deadline_s=60.0)
    return Job(request, BlockTable(pool, chain), due)


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SLOTS)
        self.scheduler = Scheduler(chunk_tokens=CHUNK, batch_requests=3)
        self.live: list[Job] = []
        self.count = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=BLOCK, max_size=24), due=st.floats(0, 9))
    def arrive(self, tokens: list[int], due: float) -> None:
        self.count += 1
        job = make_job(self.pool, tokens, str(self.count), due)
        self.scheduler.add(job)
        self.live.append(job)

    @rule()
    def admit(self) -> None:
        waiting = list(self.scheduler.waiting)
        assert self.scheduler.admit() == waiting[: len(waiting) - len(self.scheduler.waiting)]

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.scheduler.running))
        for index in data.draw(st.sets(st.integers(0, job.block_count - 1))):
            if not job.table.ready[index] and not job.table.share(index):
                job.ours[index] = True

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def pull(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.scheduler.running))
        others = [i for i in job.table.missing if not job.ours[i]]
        if others:
            job.table.landed(data.draw(st.sampled_from(others)))

    @rule()
    def step(self) -> None:
        pieces = self.scheduler.next_step()
        assert sum(piece.stop - piece.start for piece in pieces) <= CHUNK
        for piece in pieces:
            assert piece.start % BLOCK == piece.stop % BLOCK == 0
            blocks = range(piece.start // BLOCK, piece.stop // BLOCK)
            assert all(piece.job.ours[i] and not piece.job.table.ready[i] for i in blocks)
            assert all(piece.job.table.ready[: blocks.start]), "attention needs all that is before"
        for piece in pieces:
            self.scheduler.stepped(piece)
            assert all(piece.job.table.ready[: piece.stop // BLOCK])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.live))
        self.scheduler.finish(job)
        self.scheduler.finish(job)
        self.live.remove(job)

    @rule()
    def run_dry(self) -> None:
        """With every block its own, each job's blocks are all computed in a bounded time."""
        for _ in range(200):
            self.scheduler.admit()
            for job in list(self.scheduler.running):
                job.ours = [not ready for ready in job.table.ready]
                if not job.table.missing:
                    self.scheduler.finish(job)
                    self.live.remove(job)
            if not self.live:
                return
            self.step()
        raise AssertionError("a job starves")

    @invariant()
    def slots_conserve(self) -> None:
        assert sum(self.pool.counts().values()) == SLOTS
        assert self.pool.used == len({slot for job in self.live for slot in job.table.slots})
        dues = [job.due_s for job in self.scheduler.waiting]
        assert dues == sorted(dues)


TestPrefillSchedule = PrefillMachine.TestCase


def test_waiting_ages_a_job_past_more_urgent_ones() -> None:
    def request(priority: int) -> Prefill:
        return Prefill(job_id="j", tokens=(), hold_owner="", deadline_s=600, priority=priority)

    patient = due_s(request(1), 0.0)
    assert due_s(request(0), 0.0) < patient < due_s(request(0), PRIORITY_S + 1)


def test_a_deadline_comes_before_a_low_priority() -> None:
    soon = Prefill(job_id="j", tokens=(), hold_owner="", deadline_s=2, priority=9)
    assert due_s(soon, 100.0) == 102.0
