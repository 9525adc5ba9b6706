"""Which bytes of the slab are free, for several block sizes at once. Pure.

    slab   | extent, 16 slots of 190,080 | extent, 16 slots of 12,288 | free range ......... |
                 └ free slots of its own       └ all free again: the range goes back

An extent is a contiguous range cut into slots of one size, taken on demand from the free ranges;
one whose slots are all free goes back, joined with its neighbours. So a slab that serves one model
wastes nothing, and the space of a size that is no longer used serves the next. Where no hole fits a
whole extent, a smaller one is cut, down to one slot.

Blocks go in any order, so extents of one size may come to be half empty, and holes small. When
nothing fits any more and the free bytes would do, `make_room` moves blocks, if their owner lets it:

    half empty   | a . b . | . . c . |  ─>  | a c b . | hole ....... |
    small holes  | hole | a b c d | hole |  ─>  | a b c d | hole ....... |

So what is free and cannot be had is less than an extent for each size, beside what may not be moved
now. It refuses to know what the slots hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from kvass.common.block import SLOT_ALIGN
from kvass.common.errors import Invalid

# An extent comes back only when all of its slots are free, so few slots, and never more than a
# small part of the slab; cutting one costs little.
EXTENT_SLOTS = 16
EXTENT_SHARE = 16
# Holes that are looked at for joining into one, from each on: more are too many bytes to move.
JOINED_MAX = 64


@dataclass(slots=True, eq=False)
class Extent:
    """A contiguous range cut into equal slots. Mutable fields: `offset`, and `free` (offsets of its
    free slots)."""

    offset: int
    slot_size: int
    slots: int
    free: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.slot_size * self.slots

    def taken(self) -> list[int]:
        """Return the offsets of the slots that are in use, ascending."""
        every = range(self.offset, self.offset + self.size, self.slot_size)
        return sorted(set(every).difference(self.free))


class Slot(msgspec.Struct, frozen=True, eq=False, gc=False):
    """`size` bytes at `offset` of the slab; given back exactly once."""

    offset: int
    size: int
    extent: Extent


Movable = Callable[[int], bool]  # whether the block in the slot at this offset may be moved now
Relocate = Callable[[int, Slot], None]  # moves the block in the slot at this offset to another


class Extents:
    """The free space of `total` bytes. Mutable fields: `_holes` (ascending [offset, size], never
    touching), `_open` (per size: extents with free slots, as an ordered set), `_extents`,
    `free_bytes`.
    """

    def __init__(self, total: int) -> None:
        self.total = total // SLOT_ALIGN * SLOT_ALIGN
        self.free_bytes = self.total
        self._holes: list[tuple[int, int]] = [(0, self.total)]
        # A plain dict takes ever longer to find its first key, where the first is taken out.
        self._open: dict[int, OrderedDict[Extent, None]] = {}
        self._extents: set[Extent] = set()

    def take(self, size: int) -> Slot | None:
        """Hand out a slot of at least `size` bytes, or None when no hole is large enough.

        Raises Invalid for a size that can never fit.
        """
        slots = self.take_some(size, 1)
        return slots[0] if slots else None

    def take_some(self, size: int, most: int) -> list[Slot]:
        """Hand out slots as `take` does, up to `most` of them, as long as holes are large enough.

        Raises Invalid for a size that can never fit.
        """
        size = slot_size(size)
        if not 0 < size <= self.total:
            raise Invalid(f"a block of {size} bytes does not fit into a slab of {self.total}")
        slots: list[Slot] = []
        while len(slots) < most:
            extent = next(iter(self._open.get(size, ())), None)
            if extent is None:
                extent = self._cut(size)
                if extent is None:
                    break
            left = max(0, len(extent.free) - (most - len(slots)))
            slots += [Slot(offset, size, extent) for offset in reversed(extent.free[left:])]
            del extent.free[left:]
            if not extent.free:
                del self._open[size][extent]
        self.free_bytes -= size * len(slots)
        return slots

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        extent = slot.extent
        assert slot.offset not in extent.free, "a slot was given back twice"
        extent.free.append(slot.offset)
        self.free_bytes += slot.size
        if len(extent.free) == extent.slots:
            self._open[slot.size].pop(extent, None)
            self._extents.remove(extent)
            self._join(extent.offset, extent.size)
        else:
            self._open[slot.size][extent] = None

    def _cut(self, size: int) -> Extent | None:
        """Make an extent of up to EXTENT_SLOTS slots from the first hole that fits the most."""
        best = max(range(len(self._holes)), key=lambda i: self._fits(i, size), default=None)
        if best is None or not self._fits(best, size):
            return None
        offset, room = self._holes[best]
        slots = self._fits(best, size)
        if slots * size == room:
            del self._holes[best]
        else:
            self._holes[best] = (offset + slots * size, room - slots * size)
        extent = Extent(offset, size, slots)
        extent.free = list(range(offset + (slots - 1) * size, offset - 1, -size))
        self._extents.add(extent)
        self._open.setdefault(size, OrderedDict())[extent] = None
        return extent

    def _fits(self, hole: int, size: int) -> int:
        most = min(EXTENT_SLOTS, max(1, self.total // EXTENT_SHARE // size))
        return min(most, self._holes[hole][1] // size)

    def _join(self, offset: int, size: int) -> None:
        at = bisect_left(self._holes, (offset, 0))
        if at < len(self._holes) and offset + size == self._holes[at][0]:
            size += self._holes.pop(at)[1]
        if at and sum(self._holes[at - 1]) == offset:
            at -= 1
            offset, before = self._holes.pop(at)
            size += before
        self._holes.insert(at, (offset, size))

    # --- moving blocks ---

    def make_room(self, size: int, movable: Movable, relocate: Relocate) -> bool:
        """Move blocks so that a slot of `size` bytes can be taken; returns whether one can be."""
        size = slot_size(size)
        if size > self.free_bytes:
            return False
        while not self._has_hole(size):
            sparse = self._sparse(movable)
            if sparse is None:
                return self._join_holes(size, movable, relocate)
            self._empty(sparse, relocate)
        return True

    def _has_hole(self, size: int) -> bool:
        return any(room >= size for _, room in self._holes)

    def _sparse(self, movable: Movable) -> Extent | None:
        """Return the extent with the fewest bytes in use, of those whose blocks fit into others of
        their size."""
        best: tuple[int, Extent] | None = None
        for size, extents in self._open.items():
            free = sum(len(extent.free) for extent in extents)
            for extent in extents:
                taken = extent.slots - len(extent.free)
                fits = taken <= free - len(extent.free)
                if fits and (best is None or taken * size < best[0]):
                    if all(movable(offset) for offset in extent.taken()):
                        best = taken * size, extent
        return None if best is None else best[1]

    def _empty(self, extent: Extent, relocate: Relocate) -> None:
        size = extent.slot_size
        del self._open[size][extent]  # it comes back as the last one: slots are taken from others
        for offset in extent.taken():
            target = self.take(size)
            assert target is not None and target.extent is not extent
            relocate(offset, target)
            self.give(Slot(offset, size, extent))

    def _join_holes(self, size: int, movable: Movable, relocate: Relocate) -> bool:
        """Slide the extents between some holes together, those with the fewest bytes."""
        if sum(room for _, room in self._holes) < size:
            return False
        ordered = sorted(self._extents, key=lambda extent: extent.offset)
        starts = [extent.offset for extent in ordered]
        between = [
            ordered[bisect_left(starts, sum(low)) : bisect_left(starts, high[0])]
            for low, high in pairwise(self._holes)
        ]
        fixed = [
            not all(movable(offset) for extent in extents for offset in extent.taken())
            for extents in between
        ]
        runs = (self._run(first, size, between, fixed) for first in range(len(self._holes)))
        found = min((run for run in runs if run is not None), default=None)
        if found is None:
            return False
        _, first, last = found
        self._slide(first, last, [each for gap in between[first:last] for each in gap], relocate)
        return True

    def _run(
        self, first: int, size: int, between: Sequence[Sequence[Extent]], fixed: Sequence[bool]
    ) -> tuple[int, int, int] | None:
        """Return the bytes to move, and the first and last hole, for a hole of `size` from `first`
        on; None when something there may not be moved."""
        moved, room = 0, self._holes[first][1]
        for last in range(first, min(first + JOINED_MAX, len(self._holes))):
            if room >= size:
                return moved, first, last
            if last == len(self._holes) - 1 or fixed[last]:
                return None
            moved += sum(extent.size for extent in between[last])
            room += self._holes[last + 1][1]
        return None

    def _slide(self, first: int, last: int, extents: Sequence[Extent], relocate: Relocate) -> None:
        start = self._holes[first][0]
        for extent in extents:
            shift = extent.offset - start
            taken = extent.taken()
            extent.offset = start
            extent.free = [offset - shift for offset in extent.free]
            for offset in taken:  # ascending: what a block is copied onto has been moved
                relocate(offset, Slot(offset - shift, extent.slot_size, extent))
            start += extent.size
        room = sum(size for _, size in self._holes[first : last + 1])
        self._holes[first : last + 1] = [(start, room)]

    def free_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield every free (offset, size), in no order; for checks."""
        yield from self._holes
        for extent in self._extents:
            for offset in extent.free:
                yield offset, extent.slot_size


def slot_size(size: int) -> int:
    """Return the bytes that a block of `size` bytes takes in the slab."""
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN
