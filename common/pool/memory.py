"""A worker's paged KV memory: one aligned mapping, cut into slots of exactly one block.

It knows addresses and views, and nothing of who owns a slot or what is in it. A slot holds a
block's payload in `BlockLayout`'s form, so a transport moves it with one descriptor and never
gathers.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.block import BlockLayout
from kvass.common.errors import Invalid

HUGE_PAGE = 2 << 20  # x86-64 and most arm64 kernels


class SlotMemory:
    """`slots` blocks of anonymous memory, aligned to 2 MiB and backed by huge pages where possible.

    The pages are zero, and taken from the machine when they are first touched. Mutable fields:
    `array`, `tensor` and `_map`, until `close`.
    """

    def __init__(self, layout: BlockLayout, slots: int) -> None:
        if slots < 1:
            raise Invalid(f"a pool needs at least one slot, got {slots}")
        self.layout = layout
        self.slots = slots
        self.slot_size = layout.block_size
        self.size = slots * self.slot_size
        # Private: a shared anonymous mapping is shmem, which most kernels keep in small pages.
        length = self.size + HUGE_PAGE
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        _ask_for_huge_pages(self._map)
        self.array: NDArray[np.uint8] = whole[start : start + self.size].reshape(slots, -1)
        self.address = int(self.array.ctypes.data)
        self.tensor = torch.from_numpy(self.array)
        assert self.address % HUGE_PAGE == 0
        assert self.array.shape == (slots, layout.block_size)

    def address_of(self, slot: int) -> int:
        """Return the absolute address of a slot's first byte."""
        assert 0 <= slot < self.slots, slot
        return self.address + slot * self.slot_size

    def close(self) -> None:
        """Give the pages back to the machine now; the address range goes with the last view of it.

        No transfer may be in flight. Views that others still hold read zeros afterwards.
        """
        if self._map.closed:
            return
        self._map.madvise(mmap.MADV_DONTNEED)
        self.array = np.empty((0, self.slot_size), dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
        try:
            self._map.close()
        except BufferError:
            return  # Somebody holds a view: the mapping must outlive it.


def _ask_for_huge_pages(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        return  # Kernels without transparent huge pages: small ones serve as well, slower.
