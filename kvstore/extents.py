"""Which bytes of the slab are free, for several block sizes at once. Pure.

    slab   | extent, 16 slots of 190,080 | extent, 16 slots of 12,288 | free range ......... |
                 └ free slots of its own       └ all free again: the range goes back

An extent is a contiguous range cut into slots of one size, taken on demand from the free ranges;
one whose slots are all free goes back, joined with its neighbours. So a slab that serves one model
wastes nothing, and the space of a size that is no longer used serves the next. Where no hole fits a
whole extent, a smaller one is cut, down to one slot. It refuses to know what the slots hold.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvass.common.block import SLOT_ALIGN
from kvass.common.errors import Invalid

# An extent comes back only when all of its slots are free, so few slots, and never more than a
# small part of the slab; cutting one costs little.
EXTENT_SLOTS = 16
EXTENT_SHARE = 16


@dataclass(slots=True, eq=False)
class Extent:
    """A contiguous range cut into equal slots. Mutable field: `free` (offsets of its free
    slots)."""

    offset: int
    slot_size: int
    slots: int
    free: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.slot_size * self.slots


@dataclass(slots=True, frozen=True, eq=False)
class Slot:
    """`size` bytes at `offset` of the slab; given back exactly once."""

    offset: int
    size: int
    extent: Extent


class Extents:
    """The free space of `total` bytes. Mutable fields: `_holes` (ascending [offset, size], never
    touching), `_open` (per size: extents with free slots, as an ordered set), `_extents`,
    `free_bytes`.
    """

    def __init__(self, total: int) -> None:
        self.total = total // SLOT_ALIGN * SLOT_ALIGN
        self.free_bytes = self.total
        self._holes: list[tuple[int, int]] = [(0, self.total)]
        self._open: dict[int, dict[Extent, None]] = {}
        self._extents: set[Extent] = set()

    def take(self, size: int) -> Slot | None:
        """Hand out a slot of at least `size` bytes, or None when no hole is large enough.

        Raises Invalid for a size that can never fit.
        """
        size = slot_size(size)
        if not 0 < size <= self.total:
            raise Invalid(f"a block of {size} bytes does not fit into a slab of {self.total}")
        extent = next(iter(self._open.get(size, ())), None) or self._cut(size)
        if extent is None:
            return None
        slot = Slot(extent.free.pop(), size, extent)
        if not extent.free:
            del self._open[size][extent]
        self.free_bytes -= size
        return slot

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
        self._open.setdefault(size, {})[extent] = None
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

    def free_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield every free (offset, size), in no order; for checks."""
        yield from self._holes
        for extent in self._extents:
            for offset in extent.free:
                yield offset, extent.slot_size


def slot_size(size: int) -> int:
    """Return the bytes that a block of `size` bytes takes in the slab."""
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN
