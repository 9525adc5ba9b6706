"""Checks and slices of `Copies`. Pure.

Addresses and sizes may come from a peer, so nothing is assumed: an address is a user-space one, a
sum never overflows, and what is local lies inside one registered region.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvass.common.errors import Invalid
from kvass.common.transport.seam import Copies, Region

RANGES_MAX = 65_536  # in one call: 12 GB of the default model's blocks, far over any landing buffer
SLICE_BYTES = 16 << 20  # 10 ms of loopback TCP: how often deadlines are looked at
SLICE_RANGES = 1_024
_ADDRESS_MAX = 1 << 56  # user space ends below, also with five-level page tables
_SIZE_MAX = 1 << 40


class Bounds(NamedTuple):
    """The least and the largest of each of a `Copies`' values; zeros of one that is empty."""

    local: tuple[int, int]
    remote: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def size(self) -> int:
        """Return the size of each range; 0 where they differ."""
        least, largest = self.sizes
        return least if least == largest else 0

    def surely_inside(self, side: Literal["local", "remote"], region: Region) -> bool:
        """Whether all ranges of one side are inside a region for sure; where this is False each
        must be looked at."""
        least, largest = self.local if side == "local" else self.remote
        end = region.address + region.size
        return region.address <= least and largest + self.sizes[1] <= end


def check(copies: Copies, regions: Sequence[Region]) -> Bounds:
    """Return what `copies` lies between; raises Invalid unless it is well-formed and its local side
    is registered memory."""
    count = len(copies.sizes)
    if not count == len(copies.local) == len(copies.remote):
        raise Invalid(
            f"copies: {len(copies.local)} local addresses, {len(copies.remote)} remote ones and "
            f"{count} sizes; expected equally many"
        )
    if count > RANGES_MAX:
        raise Invalid(f"copies: {count} ranges in one call; at most {RANGES_MAX}")
    bounds = Bounds(
        _checked_bounds("local", copies.local, _ADDRESS_MAX),
        _checked_bounds("remote", copies.remote, _ADDRESS_MAX),
        _checked_bounds("sizes", copies.sizes, _SIZE_MAX),
    )
    if count and not bounds.sizes[0]:
        raise Invalid("copies.sizes: a range of no bytes")
    if not any(bounds.surely_inside("local", region) for region in regions):
        inside = within(copies.local, copies.sizes, regions)
        if not inside.all():
            address = int(copies.local[int(inside.argmin())])
            raise Invalid(f"copies.local: {address:#x} is not inside registered memory")
    return bounds


def _checked_bounds(name: str, array: NDArray[np.uint64], most: int) -> tuple[int, int]:
    if array.dtype != np.uint64 or array.ndim != 1:
        raise Invalid(f"copies.{name}: expected one dimension of uint64, got {array.dtype}")
    if not len(array):
        return 0, 0
    largest = int(np.maximum.reduce(array))
    if largest > most:
        raise Invalid(f"copies.{name}: {largest:#x} is over {most:#x}")
    return int(np.minimum.reduce(array)), largest


def within(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], regions: Sequence[Region]
) -> NDArray[np.bool_]:
    """Return for each range whether it lies inside one of `regions`."""
    inside = np.zeros(len(addresses), dtype=np.bool_)
    ends = addresses + sizes
    for region in regions:
        first, end = np.uint64(region.address), np.uint64(region.address + region.size)
        inside |= (addresses >= first) & (ends <= end)
    return inside


def joined(copies: Copies, regions: Sequence[Region]) -> Copies:
    """Return the same bytes in as few ranges as may be: what lies side by side on both sides is one
    range. None goes from one of the `regions` into another: those are registered each by itself.
    Regions do not overlap."""
    if len(copies.sizes) < 2:
        return copies
    begins = np.ones(len(copies.sizes), dtype=np.bool_)
    for addresses in (copies.local, copies.remote):
        begins[1:] &= addresses[1:] == addresses[:-1] + copies.sizes[:-1]
    np.logical_not(begins[1:], out=begins[1:])
    for region in regions:
        begins |= copies.local == np.uint64(region.address)
    first = np.flatnonzero(begins)
    if len(first) == len(begins):
        return copies
    sizes = np.add.reduceat(copies.sizes, first)
    return Copies(copies.local[first], copies.remote[first], sizes)


def slices(copies: Copies) -> Iterator[Copies]:
    """Yield pieces of `copies`, in order, none over SLICE_BYTES or SLICE_RANGES."""
    copies = _cut(copies)
    ends = np.cumsum(copies.sizes)
    first, taken = 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, np.uint64(taken + SLICE_BYTES), side="right"))
        last = min(last, first + SLICE_RANGES)
        assert last > first, "a range that is longer than a slice was not cut"
        piece = slice(first, last)
        yield Copies(copies.local[piece], copies.remote[piece], copies.sizes[piece])
        first, taken = last, int(ends[last - 1])


def _cut(copies: Copies) -> Copies:
    """Cut ranges that are longer than a slice."""
    sizes = copies.sizes
    if not len(sizes) or int(sizes.max()) <= SLICE_BYTES:
        return copies
    limit = np.uint64(SLICE_BYTES)
    pieces = ((sizes + limit - np.uint64(1)) // limit).astype(np.int64)
    owner = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = number.astype(np.uint64) * limit
    return Copies(
        copies.local[owner] + offsets,
        copies.remote[owner] + offsets,
        np.minimum(sizes[owner] - offsets, limit),
    )
