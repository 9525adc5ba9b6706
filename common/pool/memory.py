"""A worker's paged KV memory: one aligned mapping, cut into slots of exactly one block.

It knows addresses and views, and nothing of who owns a slot or what is in it. A slot holds a
block's payload in `BlockLayout`'s form, so a transport moves it with one descriptor and never
gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.block import BlockLayout
from kvass.common.errors import Invalid
from kvass.common.pages import HUGE_PAGE, Pages, private_pages
from kvass.common.transport.seam import Region


class SlotMemory:
    """`slots` blocks of memory, aligned to 2 MiB.

    What is computed with is read faster on huge pages, which few hosts give to shared memory; so
    the pages are private unless said otherwise. Mutable fields: `array` and `tensor`, until
    `close`.
    """

    def __init__(
        self, layout: BlockLayout, slots: int, map_pages: Callable[[int], Pages] = private_pages
    ) -> None:
        if slots < 1:
            raise Invalid(f"a pool needs at least one slot, got {slots}")
        self.layout = layout
        self.slots = slots
        self.slot_size = layout.block_size
        self.size = slots * self.slot_size
        self._pages = map_pages(self.size)
        whole: NDArray[np.uint8] = np.frombuffer(self._pages.view, dtype=np.uint8)
        self.array: NDArray[np.uint8] = whole.reshape(slots, -1)
        self.address = self._pages.address
        self.tensor = torch.from_numpy(self.array)
        assert self.address % HUGE_PAGE == 0
        assert self.array.shape == (slots, layout.block_size)

    @property
    def region(self) -> Region:
        """Return what transports register."""
        return self._pages.region

    def addresses(self, slots: Sequence[int]) -> NDArray[np.uint64]:
        """Return the absolute addresses, uint64 [len(slots)], of the slots' first bytes."""
        assert not slots or (min(slots) >= 0 and max(slots) < self.slots), slots
        return np.array(slots, dtype=np.uint64) * np.uint64(self.slot_size) + np.uint64(
            self.address
        )

    def close(self) -> None:
        """Give the pages back to the machine now; the address range goes with the last view of it.

        No transfer may be in flight. Views that others still hold read zeros afterwards.
        """
        self.array = np.empty((0, self.slot_size), dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
        self._pages.close()
