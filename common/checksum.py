"""xxh3-64 over head groups: the one checksum that proves that a block's bytes arrived.

Bytes are summed as they are copied, in one pass over memory, by the compiled library; without it by
xxhash in a second one. Both give the same sums.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvass.common.native import library

Words = NDArray[np.uint64]
SHORT = 240  # bytes up to which the sum is made in another way, which the library does not have


@dataclass(slots=True)
class Sums:
    """Checksums of ranges of equal size that are being copied, one a head group.

    Mutable: `values` uint64 [ranges, groups] and `whole` bool [ranges], which are set, first the
    one and then the other, by whoever copies a range.
    """

    values: Words
    whole: NDArray[np.bool_]

    @classmethod
    def of(cls, ranges: int, groups: int) -> Sums:
        return cls(np.zeros((ranges, groups), dtype=np.uint64), np.zeros(ranges, dtype=np.bool_))

    @property
    def groups(self) -> int:
        return int(self.values.shape[1])

    def found(self) -> dict[int, tuple[int, ...]]:
        """Return the checksums of the ranges that are whole, by their place."""
        if self.whole.all():
            return dict(enumerate(map(tuple, self.values.tolist())))
        places = np.flatnonzero(self.whole)
        return dict(zip(places.tolist(), map(tuple, self.values[places].tolist()), strict=True))


def sums(
    buffer: memoryview | NDArray[np.uint8], offset: int, group_size: int, groups: int
) -> tuple[int, ...]:
    """Return the checksum of each of `groups` consecutive ranges of `buffer` from `offset` on."""
    if _compiled() is None or group_size <= SHORT:
        view = buffer if isinstance(buffer, memoryview) else buffer.data
        return _sums_plain(view[offset:], group_size, groups)
    array = np.frombuffer(buffer, dtype=np.uint8, count=groups * group_size, offset=offset)
    return tuple(sum_ranges([array.ctypes.data], group_size, groups)[0].tolist())


def sum_ranges(addresses: Sequence[int] | Words, group_size: int, groups: int) -> Words:
    """Return the checksums uint64 [ranges, groups] of own memory; blocking, without the interpreter
    lock. The caller keeps the memory."""
    sources = np.array(addresses, dtype=np.uint64)
    values = np.empty((len(sources), groups), dtype=np.uint64)
    compiled = _compiled()
    if compiled is None or group_size <= SHORT:
        for place, address in enumerate(sources.tolist()):
            values[place] = _sums_at(address, group_size, groups)
    else:
        compiled.sum(len(sources), sources.ctypes.data, group_size, groups, values.ctypes.data)
    return values


def copy_ranges(
    targets: Words, sources: Words, size: int, into: Sums, first: int, stop: int
) -> None:
    """Copy ranges [first, stop), of `size` bytes each, and sum what was copied, into `into`.

    Addresses are this process's own; the caller keeps the memory, and no two ranges overlap.
    Blocking, and without the interpreter lock.
    """
    assert size % into.groups == 0, (size, into.groups)
    group_size, compiled = size // into.groups, _compiled()
    if compiled is None or group_size <= SHORT:
        for place in range(first, stop):
            ctypes.memmove(int(targets[place]), int(sources[place]), size)
            into.values[place] = _sums_at(int(targets[place]), group_size, into.groups)
    else:
        places = 8 * first
        compiled.copy_sum(
            stop - first,
            targets.ctypes.data + places,
            sources.ctypes.data + places,
            group_size,
            into.groups,
            into.values.ctypes.data + places * into.groups,
        )
    into.whole[first:stop] = True


def _sums_at(address: int, group_size: int, groups: int) -> tuple[int, ...]:
    memory = (ctypes.c_char * (group_size * groups)).from_address(address)
    return _sums_plain(memoryview(memory).cast("B"), group_size, groups)


def _sums_plain(view: memoryview, group_size: int, groups: int) -> tuple[int, ...]:
    starts = range(0, groups * group_size, group_size)
    return tuple(xxhash.xxh3_64_intdigest(view[start : start + group_size]) for start in starts)


class _Compiled(NamedTuple):
    sum: Callable[..., None]
    copy_sum: Callable[..., None]


@functools.cache
def _compiled() -> _Compiled | None:
    size, address = ctypes.c_uint64, ctypes.c_void_p
    sum_ = library.function("kvass_sum", None, size, address, size, size, address)
    copy_sum = library.function("kvass_copy_sum", None, size, address, address, size, size, address)
    return None if sum_ is None or copy_sum is None else _Compiled(sum_, copy_sum)
