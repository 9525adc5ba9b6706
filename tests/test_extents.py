"""The slab's space: several block sizes at once, any order of drops, and what can never be had."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.common.errors import Invalid
from kvass.kvstore.index.extents import EXTENT_SLOTS, Extents, Slot
from kvass.kvstore.node import slab

TOTAL = 32 << 10
SIZES = (64, 192, 320, 1024, 2048)
LARGEST = max(SIZES)


class Owner:
    """Blocks in slots, and what a slab would hold of each. Mutable fields: all."""

    def __init__(self) -> None:
        self.extents = Extents(TOTAL)
        self.slots: dict[int, Slot] = {}  # by block
        self.at: dict[int, int] = {}  # blocks by the offset of their slots
        self.memory: dict[int, int] = {}  # by byte, in steps of 64: whose
        self.fixed: set[int] = set()  # blocks that may not be moved
        self._count = 0

    def take(self, size: int) -> bool:
        """Take a slot, moving others as needed; whether there was one."""
        slot = self.extents.take(size)
        if slot is None and self.extents.make_room(size, self.is_movable, self.relocate):
            slot = self.extents.take(size)
            assert slot is not None, "room was said to be made"
        if slot is None:
            return False
        self._count += 1
        self._put(self._count, slot)
        for offset in range(slot.offset, slot.offset + slot.size, 64):
            self.memory[offset] = self._count
        return True

    def _put(self, block: int, slot: Slot) -> None:
        self.slots[block], self.at[slot.offset] = slot, block

    def drop(self, block: int) -> None:
        slot = self.slots.pop(block)
        del self.at[slot.offset]
        self.fixed.discard(block)
        self.extents.give(slot)

    def is_movable(self, offset: int) -> bool:
        return self.at[offset] not in self.fixed

    def relocate(self, offset: int, slot: Slot) -> None:
        block = self.at.pop(offset)
        assert block not in self.fixed
        for step in range(0, slot.size, 64):  # ascending, as memmove does downwards
            self.memory[slot.offset + step] = self.memory[offset + step]
        self._put(block, slot)

    def check(self) -> None:
        """Assert that every byte has one owner, and every block its own bytes."""
        used = [(slot.offset, slot.size) for slot in self.slots.values()]
        end = 0
        for offset, size in sorted([*used, *self.extents.free_ranges()]):
            assert offset == end
            end = offset + size
        assert end == TOTAL
        for block, slot in self.slots.items():
            found = {self.memory[o] for o in range(slot.offset, slot.offset + slot.size, 64)}
            assert found == {block}

    def free_bytes(self) -> int:
        return TOTAL - sum(slot.size for slot in self.slots.values())

    def extents_of(self) -> Mapping[int, int]:
        """Return the size of the largest extent that each size may have."""
        return {
            size: min(EXTENT_SLOTS, max(1, TOTAL // EXTENT_SLOTS // size)) * size for size in SIZES
        }


sizes = st.sampled_from(SIZES)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("take"), sizes, st.integers(1, 40)),
        st.tuples(st.just("drop"), st.integers(0, 1 << 16), st.integers(1, 60)),
    ),
    max_size=30,
)


def play(owner: Owner, history: list[tuple[str, int, int]]) -> None:
    for verb, value, times in history:
        for i in range(times):
            if verb == "take":
                owner.take(value)
            elif owner.slots:
                blocks = list(owner.slots)
                owner.drop(blocks[(value + i * 7919) % len(blocks)])


@given(steps, sizes)
def test_what_is_free_and_cannot_be_had_is_less_than_an_extent_of_each_size(
    history: list[tuple[str, int, int]], size: int
) -> None:
    owner = Owner()
    play(owner, history)
    owner.check()
    while owner.take(size):
        pass
    others = {slot.size for slot in owner.slots.values()} - {size}
    waste = sum(owner.extents_of()[other] for other in others)
    owner.check()
    assert owner.free_bytes() < size + waste


@given(steps, sizes, st.integers(2, 9))
def test_blocks_in_use_stay_where_they_are_and_all_keep_their_bytes(
    history: list[tuple[str, int, int]], size: int, one_in: int
) -> None:
    owner = Owner()
    play(owner, history)
    owner.fixed = {block for block in owner.slots if block % one_in == 0}
    places = {block: owner.slots[block].offset for block in owner.fixed}
    while owner.take(size):
        pass
    owner.check()
    assert {block: owner.slots[block].offset for block in places} == places


@given(steps)
def test_the_space_of_dropped_blocks_comes_back_whole(
    history: list[tuple[str, int, int]],
) -> None:
    """As when a namespace is dropped: the space of its size serves any other."""
    owner = Owner()
    play(owner, history)
    for block in list(owner.slots):
        owner.drop(block)
    assert list(owner.extents.free_ranges()) == [(0, TOTAL)]
    assert owner.extents.take(TOTAL) is not None


def test_one_size_wastes_nothing() -> None:
    for size in SIZES:
        owner = Owner()
        while owner.take(size):
            pass
        assert owner.free_bytes() == TOTAL % size


def test_half_empty_extents_are_emptied_and_small_holes_joined() -> None:
    owner = Owner()
    while owner.take(64):
        pass
    for block in [block for block in owner.slots if block % 2]:
        owner.drop(block)
    assert owner.extents.take(LARGEST) is None, "every extent is half empty"
    taken = 0
    while owner.take(LARGEST):
        taken += 1
    assert taken == TOTAL // 2 // LARGEST
    owner.check()


def test_a_block_that_can_never_fit_is_said() -> None:
    with pytest.raises(Invalid, match=f"{TOTAL + 64} bytes does not fit"):
        Extents(TOTAL).take(TOTAL + 1)


def test_a_slab_is_checked_against_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab, "available_bytes", lambda: 10 << 20)
    slab.Slab(9 << 20).close()
    for size in (0, 10 << 20, 1 << 50):
        with pytest.raises(Invalid, match=rf"store.slab_bytes is {size}; this host can give"):
            slab.Slab(size)


def test_copies_inside_a_slab_may_overlap() -> None:
    made = slab.Slab(1 << 16)
    data = bytes(range(256)) * 16
    for source, target in ((0, 100), (5000, 4900), (9000, 9000)):
        made.view[source : source + len(data)] = data
        made.copy(source, target, len(data))
        assert bytes(made.view[target : target + len(data)]) == data
    made.close()
