"""A decode worker's requests against a dumb model: whatever order abort, finish, failure and the
store's answers come in, also twice and also while a step runs, each request ends once and its slots
come back once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.keys import BlockKey
from request_stage import (
    ANSWER_MAX,
    BATCH,
    PROMPT_MAX,
    SLOTS,
    Pending,
    Worker,
    chain_of,
    prompt_of,
    reference,
)

T = TypeVar("T")


class RequestMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = Worker()

    # --- what happens ---

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, PROMPT_MAX),
        max_tokens=st.integers(1, ANSWER_MAX),
        pending=st.sampled_from([False, False, True]),
    )
    def arrive(self, family: int, length: int, max_tokens: int, pending: bool) -> None:
        self.worker.arrive(prompt_of(family, length), max_tokens, pending=pending)

    @rule(count=st.integers(1, 5))
    def things_move(self, count: int) -> None:
        """What waits is answered, pulls with all they asked for, steps after all else."""
        for _ in range(count):
            if self.worker.store.pending:
                call = self.worker.store.pending[0]
                call.granted = self._there(call)
                self.worker.call(call.ended.set)
            elif self.worker.executor.pending:
                self.worker.call(self.worker.executor.pending.ended.set)

    @precondition(lambda self: self.worker.executor.pending)
    @rule()
    def a_step_ends(self) -> None:
        call = self.worker.executor.pending
        assert call is not None
        self.worker.call(call.ended.set)

    @precondition(lambda self: self.worker.executor.pending)
    @rule()
    def a_step_fails(self) -> None:
        call = self.worker.executor.pending
        assert call is not None
        call.fails = True
        self.worker.call(call.ended.set)

    @precondition(lambda self: self.worker.store.pending)
    @rule(data=st.data())
    def the_store_answers(self, data: st.DataObject) -> None:
        call = self._one(data, self.worker.store.pending)
        there = self._there(call)
        if there:
            call.granted = tuple(sorted(data.draw(st.sets(st.sampled_from(there)))))
        self.worker.call(call.ended.set)

    @rule(data=st.data(), family=st.integers(0, 1))
    def prefill_stores_blocks(self, data: st.DataObject, family: int) -> None:
        prompt = prompt_of(family, PROMPT_MAX)
        self.worker.memory.register(prompt)
        keys = chain_of(prompt).keys
        self.worker.store.blocks |= set(data.draw(st.sets(st.sampled_from(keys))))

    @rule()
    def the_store_loses_everything(self) -> None:
        self.worker.store.blocks.clear()

    @precondition(lambda self: self.worker.lives)
    @rule(data=st.data())
    def prefill_is_over(self, data: st.DataObject) -> None:
        life = self._one(data, self.worker.lives)
        name = life.ticket.sequence.request.request_id
        self.worker.call(lambda: self.worker.loop.prefill_over(name))

    @precondition(lambda self: self.worker.lives)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A client that went away, or a deadline: at any moment."""
        live = [life for life in self.worker.lives if not life.ends]
        self.worker.call(self._one(data, live or self.worker.lives).scope.cancel)

    @precondition(lambda self: self.worker.executor.pending)
    @rule(data=st.data())
    def abort_in_a_step(self, data: st.DataObject) -> None:
        stepping = [life for life in self.worker.lives if life.ticket.sequence.in_step]
        self.worker.call(self._one(data, stepping).scope.cancel)

    @precondition(lambda self: self.worker.lives)
    @rule(data=st.data())
    def the_end_comes_again(self, data: st.DataObject) -> None:
        life = self._one(data, self.worker.lives)
        if life.ticket.is_leaving:
            self.worker.call(lambda: self.worker.loop.leave(life.ticket))

    @rule()
    def forget(self) -> None:
        self.worker.pool.forget()
        self.worker.call(self.worker.loop.wake)

    def run_dry(self) -> None:
        """Nothing starves and nothing leaks: with every answer given, all ends and all is free."""
        for life in self.worker.lives:
            self.worker.call(life.ticket.prefill_over.set)
        for _ in range(600):
            pending = [self.worker.executor.pending, *self.worker.store.pending]
            calls = [call for call in pending if call is not None]
            if not calls:
                break
            self.worker.call(calls[0].ended.set)
        assert all(life.ends for life in self.worker.lives), "a request starves"
        assert self.worker.pool.used == 0, self.worker.pool.counts()
        assert not self.worker.scheduler.waiting and not self.worker.scheduler.admitted

    def teardown(self) -> None:
        try:
            self.run_dry()
        finally:
            self.worker.close()

    def _there(self, call: Pending) -> tuple[int, ...]:
        """Return which of a pull's blocks the store can give."""
        if call.name != "pull" or call.chain is None:
            return ()
        keys = call.chain.keys
        return tuple(i for i in call.indices if keys[i] in self.worker.store.blocks)

    @staticmethod
    def _one(data: st.DataObject, items: Sequence[T]) -> T:
        return items[data.draw(st.integers(0, len(items) - 1))]

    # --- what must hold ---

    @invariant()
    def slots_conserve(self) -> None:
        pool = self.worker.pool
        assert sum(pool.counts().values()) == SLOTS
        tables = [life.ticket.table.slots for life in self.worker.lives]
        held = {slot for slots in tables for slot in slots}
        held |= {slot for call in self.worker.store.pending for slot in call.slots}
        queued = self.worker.offerer._receive.statistics().current_buffer_used
        assert pool.used == len(held) or queued, "a slot is lost, or was given back too early"

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        """While no step runs, the loop sleeps: whatever frees slots must have woken it."""
        scheduler, counts = self.worker.scheduler, self.worker.pool.counts()
        if self.worker.executor.pending is None and scheduler.waiting:
            head = scheduler.waiting[0]
            need = head.table.blocks(len(head.tokens)) + len(scheduler.admitted)
            need += sum(other.table.lacks(len(other.tokens)) for other in scheduler.admitted)
            assert need > counts["free"] or len(scheduler.admitted) >= BATCH, "a lost wake-up"

    @invariant()
    def each_slot_has_one_writer(self) -> None:
        pool = self.worker.pool
        owners: dict[int, int] = {}
        for life in self.worker.lives:
            table = life.ticket.table
            assert len(set(table.slots)) == len(table.slots)
            for index, slot in enumerate(table.slots):
                if not any(table.ready[index : index + 1]):
                    owners[slot] = owners.get(slot, 0) + 1
        assert all(count == 1 for count in owners.values()), "a slot has two owners"
        for key in self.worker.memory.expected:
            found = pool.find(BlockKey(key))
            assert found is None or found not in owners, "a slot that is written has a name"

    @invariant()
    def a_named_block_keeps_its_content(self) -> None:
        for key, content in self.worker.memory.expected.items():
            slot = self.worker.pool.find(BlockKey(key))
            assert slot is None or self.worker.memory.block(slot) == content

    @invariant()
    def each_request_ends_once_and_rightly(self) -> None:
        live = {*self.worker.scheduler.waiting, *self.worker.scheduler.admitted}
        for life in self.worker.lives:
            sequence = life.ticket.sequence
            assert len(life.ends) <= 1
            assert (sequence.state == "over") == (sequence not in live)
            if sequence.state == "over":
                assert not sequence.table.slots and life.ends
            else:
                assert not life.ends or sequence.in_step or life.ticket.fetch_scope is not None, (
                    "a request that has ended keeps its slots"
                )
            right = reference(sequence.request.tokens, life.max_tokens)
            assert life.tokens == right[: len(life.tokens)]
            if life.ends == ["finished"]:
                assert life.tokens == right


RequestMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestRequests = RequestMachine.TestCase


def test_what_a_suspended_request_lost_is_not_offered_under_its_name() -> None:
    """It comes back to other slots: what it had computed is in them only once it is there again."""
    worker = Worker()
    try:
        worker.arrive(prompt_of(0, 8), 18, pending=False)
        worker.arrive(prompt_of(1, 12), 18, pending=False)
        old, young = worker.lives
        sequence, table = young.ticket.sequence, young.ticket.table
        while not (sequence.suspended_count and table.slots):
            waiting = [*worker.store.pending, worker.executor.pending]
            worker.call(next(call for call in waiting if call is not None).ended.set)
        assert table.missing and sequence.state == "fetching"
        worker.call(young.scope.cancel)
        while worker.store.pending:
            worker.call(worker.store.pending[0].ended.set)
        assert old.ends == ["finished"] and young.ends == ["aborted"]
        assert worker.pool.used == 0
    finally:
        worker.close()


def test_who_waits_behind_a_request_that_leaves_moves_up() -> None:
    """Nothing was running and no slot came back: the place in the queue did."""
    worker = Worker()
    try:
        for family, length in ((0, 20), (1, 20), (1, 2)):
            worker.arrive(prompt_of(family, length), 2, pending=True)
        assert [life.ticket.sequence.state for life in worker.lives] == [
            "fetching", "waiting", "waiting",
        ]  # fmt: skip
        worker.call(worker.lives[1].scope.cancel)
        assert worker.lives[2].ticket.sequence.state == "fetching"
    finally:
        worker.close()
