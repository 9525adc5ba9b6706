"""The policies that the store's own is judged by, behind the same seam.

The queues of S3-FIFO and SIEVE know no chains: a block that may not go (its children are there) is
passed over as one that was used, which it was: a child's use is its parents'. LRU is the store's
`ChainLru`. Belady knows the future.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvass.common.block import BlockHeader

NEVER = 1 << 60
Rank = TypeVar("Rank", tuple[int, int], tuple[int, int, int])


class Lfu:
    """Fewest uses since it came first; of equals the least recently used, its end first."""

    def __init__(self) -> None:
        self._ranks: dict[bytes, tuple[int, int, int]] = {}  # uses, stamp, -index
        self._heap: list[tuple[tuple[int, int, int], bytes]] = []
        self._stamp = 0

    def insert(self, header: BlockHeader) -> None:
        self._ranks[header.key] = (1, self._stamp, -header.index)

    def touch(self, keys: Iterable[bytes]) -> None:
        self._stamp += 1
        for key in keys:
            uses, _, index = self._ranks[key]
            self._ranks[key] = (uses + 1, self._stamp, index)

    def remove(self, key: bytes) -> None:
        del self._ranks[key]

    def offer(self, key: bytes) -> None:
        heapq.heappush(self._heap, (self._ranks[key], key))

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        return _least(self._heap, self._ranks, evictable)


class Sieve:
    """SIEVE (NSDI'24): one queue; a hand from the oldest on spares, once, what was used."""

    def __init__(self) -> None:
        self._used: OrderedDict[bytes, bool] = OrderedDict()  # newest last
        self._older: dict[bytes, bytes | None] = {}
        self._newer: dict[bytes, bytes | None] = {}
        self._newest: bytes | None = None
        self._hand: bytes | None = None

    def insert(self, header: BlockHeader) -> None:
        key = header.key
        self._used[key] = False
        self._older[key], self._newer[key] = self._newest, None
        if self._newest is not None:
            self._newer[self._newest] = key
        self._newest = key

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._used[key] = True

    def remove(self, key: bytes) -> None:
        older, newer = self._older.pop(key), self._newer.pop(key)
        del self._used[key]
        if older is not None:
            self._newer[older] = newer
        if newer is not None:
            self._older[newer] = older
        else:
            self._newest = older
        if self._hand == key:
            self._hand = newer

    def offer(self, key: bytes) -> None:
        """Nothing to do: the hand asks every block that it meets."""

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(2 * len(self._used)):
            key = self._hand if self._hand is not None else next(iter(self._used))
            if not self._used[key] and evictable(key):
                self._hand = key
                return key
            self._used[key] = False
            self._hand = self._newer[key]
        return None


class S3Fifo:
    """S3-FIFO (SOSP'23): a tenth for the new, the rest for what was used again, ghosts as many as
    blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small: OrderedDict[bytes, None] = OrderedDict()
        self._main: OrderedDict[bytes, None] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._uses: dict[bytes, int] = {}

    def insert(self, header: BlockHeader) -> None:
        known = header.key in self._ghosts
        self._ghosts.pop(header.key, None)
        (self._main if known else self._small)[header.key] = None
        self._uses[header.key] = 0

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._uses[key] = min(3, self._uses[key] + 1)

    def remove(self, key: bytes) -> None:
        del self._uses[key]
        if key in self._main:
            del self._main[key]
            return
        del self._small[key]
        self._ghosts[key] = None
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)

    def offer(self, key: bytes) -> None:
        """Nothing to do: the queues ask every block that comes up."""

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        queues = [self._from_small, self._from_main]
        if len(self._small) <= self._capacity // 10:
            queues.reverse()
        for queue in queues:
            key = queue(evictable)
            if key is not None:
                return key
        return self._from_main(evictable)

    def _from_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(len(self._small)):
            key = next(iter(self._small))
            if self._uses[key] > 1:
                del self._small[key]
                self._main[key] = None
                self._uses[key] = 0
            elif evictable(key):
                return key
            else:
                self._small.move_to_end(key)
        return None

    def _from_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        for _ in range(4 * len(self._main)):
            key = next(iter(self._main))
            if not self._uses[key] and evictable(key):
                return key
            self._uses[key] = max(0, self._uses[key] - 1)
            self._main.move_to_end(key)
        return None


class Belady:
    """The block whose next use is farthest first; what is farther than all is not let in.

    A block's next use is never before its parent's, so the order never asks for a parent before its
    children, and the optimum without chains is the one with them.
    """

    def __init__(self, requests: Sequence[Sequence[BlockHeader]]) -> None:
        self._next: list[dict[bytes, int]] = [{} for _ in requests]
        later: dict[bytes, int] = {}
        for number in range(len(requests) - 1, -1, -1):
            for header in requests[number]:
                self._next[number][header.key] = later.get(header.key, NEVER)
                later[header.key] = number
        self._ranks: dict[bytes, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], bytes]] = []
        self.number = 0  # of the request that runs
        self.coming: BlockHeader | None = None  # what room is asked for

    def insert(self, header: BlockHeader) -> None:
        self._ranks[header.key] = (-self._next[self.number][header.key], -header.index)

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._ranks[key] = (-self._next[self.number][key], self._ranks[key][1])

    def remove(self, key: bytes) -> None:
        del self._ranks[key]

    def offer(self, key: bytes) -> None:
        heapq.heappush(self._heap, (self._ranks[key], key))

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        assert self.coming is not None
        key = _least(self._heap, self._ranks, evictable)
        coming = self._next[self.number][self.coming.key]
        return None if key is None or -self._ranks[key][0] <= coming else key


def _least(
    heap: list[tuple[Rank, bytes]], ranks: Mapping[bytes, Rank], evictable: Callable[[bytes], bool]
) -> bytes | None:
    """Return the block of the least rank that may go; what is out of date in the heap is put
    right."""
    while heap:
        rank, key = heap[0]
        now = ranks.get(key)
        if now is None or not evictable(key):
            heapq.heappop(heap)
        elif now != rank:
            heapq.heapreplace(heap, (now, key))
        else:
            return key
    return None
