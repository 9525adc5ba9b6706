"""The worker pool against a dumb model: every slot has one state, and no block is lost or
doubled."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.keys import BlockKey
from kvass.common.pool.pool import BlockPool

SLOTS = 6


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


class PoolMachine(RuleBasedStateMachine):
    """Requests hold lists of slots; the model remembers which block each slot must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SLOTS)
        self.held: list[list[int]] = []
        self.content: dict[int, int] = {}  # slot -> block number that was named in it
        self.private: set[int] = set()

    @rule(count=st.integers(1, SLOTS))
    def allocate(self, count: int) -> None:
        available = self.pool.available
        slots = self.pool.allocate(count)
        in_use = {slot for request in self.held for slot in request}
        if slots is None:
            assert count > available or any(request for request in self.held)
            return
        assert not in_use & set(slots), "a slot in use was handed out again"
        for slot in slots:
            self.content.pop(slot, None)
        self.private |= set(slots)
        self.held.append(slots)

    @precondition(lambda self: self.private)
    @rule(data=st.data(), number=st.integers(1, 9))
    def name(self, data: st.DataObject, number: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.private)))
        present = self.pool.find(key_of(number)) is not None
        assert self.pool.name(slot, key_of(number), key_of(number - 1)) == (not present)
        if not present:
            self.private.discard(slot)
            self.content[slot] = number

    @rule(number=st.integers(1, 9))
    def retain_key(self, number: int) -> None:
        slot = self.pool.retain_key(key_of(number))
        if slot is not None:
            assert self.content[slot] == number
            self.held.append([slot])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        slots = self.held.pop(index)
        self.pool.release(slots)
        in_use = {slot for request in self.held for slot in request}
        self.private -= set(slots) - in_use

    @rule(number=st.integers(1, 9))
    def forget(self, number: int) -> None:
        self.pool.forget([key_of(number)])

    @invariant()
    def slots_conserve(self) -> None:
        counts = self.pool.counts()
        assert sum(counts.values()) == SLOTS
        in_use = {slot for request in self.held for slot in request}
        assert counts["private"] + counts["shared"] == len(in_use) == self.pool.used

    @invariant()
    def what_is_in_use_is_found(self) -> None:
        for request in self.held:
            for slot in request:
                if slot not in self.private:
                    assert self.pool.find(key_of(self.content[slot])) == slot


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_parents_outlive_children() -> None:
    pool = BlockPool(3)
    slots = pool.allocate(3)
    assert slots is not None
    for index, slot in enumerate(slots):
        pool.name(slot, key_of(index + 1), key_of(index))
    pool.release(slots)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert [pool.find(key_of(n + 1)) is not None for n in range(3)] == [
            n < left for n in range(3)
        ]


def test_forget_all_keeps_what_is_in_use() -> None:
    pool = BlockPool(2)
    slots = pool.allocate(2)
    assert slots is not None
    for index, slot in enumerate(slots):
        pool.name(slot, key_of(index + 1), key_of(index))
    pool.release(slots[1:])
    assert pool.forget() == 1
    assert pool.find(key_of(1)) == slots[0] and pool.find(key_of(2)) is None
