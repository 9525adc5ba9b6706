"""The worker pool against a dumb model: every slot has one state, no block is lost or doubled, and
what is evicted is what was used least lately and has no children."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.keys import BlockKey
from kvass.common.pool.pool import BlockPool

SLOTS = 6
BLOCKS = range(1, 8)


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def parent_of(number: int) -> int:
    """Blocks 1 … 7 are a tree: each has two children, as far as there are any."""
    return number // 2


class PoolMachine(RuleBasedStateMachine):
    """Owners hold lists of slots. The model keeps who holds what, what each slot holds, and when a
    block was named or given back last; it says which blocks go, and the pool must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SLOTS)
        self.held: list[list[int]] = []
        self.private: set[int] = set()
        self.names: dict[int, int] = {}  # block number -> slot
        self.used_at: dict[int, int] = {}  # by block number
        self.ticks = 0

    # --- the model ---

    @property
    def users(self) -> Counter[int]:
        return Counter(slot for owner in self.held for slot in owner)

    def touch(self, number: int) -> None:
        self.ticks += 1
        self.used_at[number] = self.ticks

    def unused(self) -> list[int]:
        return [number for number, slot in self.names.items() if not self.users[slot]]

    def evictable(self) -> list[int]:
        """Unused blocks without unused children, the one used least lately first."""
        parents = {parent_of(number) for number in self.unused()}
        leaves = [number for number in self.unused() if number not in parents]
        return sorted(leaves, key=lambda number: self.used_at[number])

    def evict(self, count: int) -> None:
        for _ in range(count):
            del self.names[self.evictable()[0]]

    # --- what happens ---

    @rule(count=st.integers(1, SLOTS))
    def allocate(self, count: int) -> None:
        used = set(self.users)
        free = SLOTS - len(used) - len(self.unused())
        enough = count <= free + len(self.unused())
        before = set(self.names)
        if enough:
            self.evict(count - free)
        fits = enough and count <= free + len(before - set(self.names))
        slots = self.pool.allocate(count)
        assert (slots is not None) == fits
        if slots is not None:
            assert len(set(slots)) == count and not used & set(slots), "a slot has two owners"
            assert not set(slots) & set(self.names.values())
            self.private |= set(slots)
            self.held.append(slots)

    @precondition(lambda self: self.private)
    @rule(data=st.data(), number=st.sampled_from(BLOCKS))
    def name(self, data: st.DataObject, number: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.private)))
        is_new = number not in self.names
        assert self.pool.name(slot, key_of(number), key_of(parent_of(number))) == is_new
        if is_new:
            self.private.discard(slot)
            self.names[number] = slot
            self.touch(number)

    @rule(number=st.sampled_from(BLOCKS))
    def retain_key(self, number: int) -> None:
        slot = self.pool.retain_key(key_of(number))
        assert slot == self.names.get(number)
        if slot is not None:
            self.held.append([slot])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        """A transfer uses what a request has."""
        slots = data.draw(st.sampled_from(self.held))
        for slot in slots:
            self.pool.retain(slot)
        self.held.append(list(slots))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(slots)
        numbers = {slot: number for number, slot in self.names.items()}
        for slot in reversed(slots):
            if slot in numbers:
                self.touch(numbers[slot])
        self.private -= set(slots) - set(self.users)

    @rule(numbers=st.lists(st.sampled_from(BLOCKS)))
    def forget(self, numbers: list[int]) -> None:
        """By name, also twice the same; no name means all."""
        gone = set(self.unused()) & (set(numbers) or set(BLOCKS))
        assert self.pool.forget([key_of(number) for number in numbers]) == len(gone)
        for number in gone:
            del self.names[number]

    # --- what must hold ---

    @invariant()
    def slots_conserve(self) -> None:
        counts = self.pool.counts()
        cached = len(self.unused())
        assert sum(counts.values()) == SLOTS == self.pool.total
        assert counts["private"] == len(self.private)
        assert counts["cached"] == cached
        assert counts["shared"] == len(self.names) - cached
        assert self.pool.used == len(self.users) == SLOTS - self.pool.available

    @invariant()
    def what_has_a_name_is_found(self) -> None:
        for number in BLOCKS:
            assert self.pool.find(key_of(number)) == self.names.get(number)


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
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


def test_every_unused_block_can_go_also_under_a_child_in_use() -> None:
    """What counts as available is: who was promised a slot gets one."""
    pool = BlockPool(3)
    slots = pool.allocate(2)
    assert slots is not None
    for index, slot in enumerate(slots):
        pool.name(slot, key_of(index + 1), key_of(index))
    pool.release(slots[:1])
    assert pool.available == 2 and pool.allocate(3) is None
    assert pool.counts() == {"free": 1, "private": 0, "shared": 1, "cached": 1}
    assert pool.allocate(2) is not None
    assert pool.find(key_of(1)) is None and pool.find(key_of(2)) == slots[1]


def test_forget_all_keeps_what_is_in_use() -> None:
    pool = BlockPool(2)
    slots = pool.allocate(2)
    assert slots is not None
    for index, slot in enumerate(slots):
        pool.name(slot, key_of(index + 1), key_of(index))
    pool.release(slots[1:])
    assert pool.forget() == 1
    assert pool.find(key_of(1)) == slots[0] and pool.find(key_of(2)) is None
    assert pool.forget([key_of(2)]) == 0 and pool.emptied_count == 1
