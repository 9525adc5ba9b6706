"""Which visible block goes first when the slab is full. Pure: the seam, and LRU by chain.

The index keeps what no policy may break (nothing leased, held or pinned goes, and no parent before
its children) and asks the policy only for an order among the rest. A policy refuses to know about
bytes, slots and time of day.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from kvass.common.block import BlockHeader


class Eviction(Protocol):
    """An order of eviction. A block is inserted once, offered whenever it may go, removed once."""

    def insert(self, header: BlockHeader) -> None:
        """A block became visible; it counts as just used."""
        ...

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks of one chain were asked for together: they and their ancestors are young."""
        ...

    def remove(self, key: bytes) -> None:
        """The block is gone."""
        ...

    def offer(self, key: bytes) -> None:
        """The block may be evicted from now on (offering it twice is harmless)."""
        ...

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Return the block to evict next, or None when no offered block is `evictable` now.

        An offered block that is not evictable is forgotten until it is offered again.
        """
        ...


class _Age:
    """Mutable fields: `stamp` (when last used), `offered` (has an entry in the heap)."""

    __slots__ = ("index", "offered", "parent", "stamp")

    def __init__(self, parent: bytes, index: int, stamp: int) -> None:
        self.parent = parent
        self.index = index
        self.stamp = stamp
        self.offered = False


class ChainLru:
    """Least recently used chain first, its deepest block first. Mutable fields: `_ages`, `_heap`,
    `_stamp`.

    A use touches a block's ancestors too, so ages agree between the nodes that hold parts of a
    chain. The heap holds one entry an offered block, with the age it had then; one that was used
    since is pushed back when it comes up, so a use itself costs only a store to a field.
    """

    def __init__(self) -> None:
        self._ages: dict[bytes, _Age] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self._stamp = 0

    def insert(self, header: BlockHeader) -> None:
        assert header.key not in self._ages
        self._stamp += 1
        self._ages[header.key] = _Age(header.parent, header.index, self._stamp)

    def touch(self, keys: Iterable[bytes]) -> None:
        self._stamp += 1
        for key in keys:
            age = self._ages.get(key)
            while age is not None and age.stamp != self._stamp:
                age.stamp = self._stamp
                age = self._ages.get(age.parent)

    def remove(self, key: bytes) -> None:
        # Its heap entry, if any, is dropped when it comes up: the heap is compacted at twice the
        # size.
        del self._ages[key]
        if len(self._heap) > 2 * len(self._ages) + 64:
            self._compact()

    def offer(self, key: bytes) -> None:
        age = self._ages[key]
        if not age.offered:
            age.offered = True
            heapq.heappush(self._heap, (age.stamp, -age.index, key))

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        while self._heap:
            stamp, _, key = self._heap[0]
            age = self._ages.get(key)
            if age is None or not age.offered or not evictable(key):
                heapq.heappop(self._heap)
                if age is not None:
                    age.offered = False
            elif age.stamp != stamp:
                heapq.heapreplace(self._heap, (age.stamp, -age.index, key))
            else:
                return key
        return None

    def _compact(self) -> None:
        kept = {key for _, _, key in self._heap if key in self._ages and self._ages[key].offered}
        self._heap = [(self._ages[key].stamp, -self._ages[key].index, key) for key in kept]
        heapq.heapify(self._heap)
