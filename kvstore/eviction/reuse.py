"""Evict what is least worth its room: its chance of use, times its cost to compute, by its bytes.

Pure. How soon a block is used again it learns from the node's own touches (`reuse_rates`): by how
often the block was used and how long ago, counted in touches, for blocks that are here and for
those that went lately (`ghosts`). A block of one use is worth little from the start, so a scan
evicts itself; one that was used often is worth much, and less with each touch that isn't its own.

Within a class (equally many uses, equal cost a byte) the oldest is worth least, so each class is a
heap as in `ChainLru`, and the victim is the least of the classes' oldest: a touch costs a store to
two fields, an eviction a push or two, and once a touch the value of some dozens of classes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from kvass.common.block import BlockHeader
from kvass.kvstore.eviction.ghosts import Ghosts
from kvass.kvstore.eviction.rates import CLASSES, ReuseRates, bin_of

GHOSTS_PER_BLOCK = 8  # most blocks that come back at all then come while remembered
GHOSTS_MIN = 64
# Touches closer together than this part of the time in which the store fills anew are one use: a
# request looks its blocks up, puts and gets them. What is touched so soon again stays anyway.
USES_PER_TURN = 12
INSERTS_PER_TOUCH = 64  # what comes in with no touch between ages the rest all the same
# Attention makes a token at this place twice as dear as the first: parameters by twice layers
# times width, here of an 8B model (32 layers of 4,096).
DOUBLE_TOKENS = 30_720
_STEPS = 2  # classes of cost to an octave

Kind = tuple[int, int]  # uses, and 1/_STEPS octaves of cost a byte


def prefill_cost(header: BlockHeader) -> float:
    """Return what it takes to compute a block again, in any unit.

    Its bytes stand for the size of its model, which a node does not know: what has more layers and
    heads takes longer. Of the growth with depth the root is taken: deep blocks come back seldomer
    (on the trace, 12 % at depth 64 to 128, 29 % at the start), which the classes of use don't see.
    """
    position = header.index * header.token_count
    return header.length * math.sqrt(1 + position / DOUBLE_TOKENS)


class _Block:
    """Mutable fields: `uses` (up to CLASSES), `since` (when the last one began), `stamp` (of the
    last touch), `offered` (has an entry)."""

    __slots__ = ("cost", "index", "offered", "parent", "since", "stamp", "uses")

    def __init__(self, header: BlockHeader, cost: int, uses: int, stamp: int) -> None:
        self.parent = header.parent
        self.index = header.index
        self.cost = cost
        self.uses = uses
        self.since = self.stamp = stamp
        self.offered = False


class ReuseEviction:
    """Mutable fields: `_blocks`, `_ghosts`, `_rates`, `_stamp` (counts touches), `_inserts` (since
    the last), `_turn` (inserts until as many came as are here), `_turned` (when they last had),
    `_use_length` (the touches that one use may last), `_heaps` (offered blocks by kind; an entry
    that is out of date is put right when it comes up), `_entries` (in them), `_front` (the kinds by
    the value of their oldest, as of `_front_stamp`).
    """

    def __init__(self, cost: Callable[[BlockHeader], float] = prefill_cost) -> None:
        self._cost = cost
        self._blocks: dict[bytes, _Block] = {}
        self._ghosts = Ghosts(GHOSTS_MIN)
        self._rates = ReuseRates()
        self._stamp = 0
        self._inserts = 0
        self._turn = 0
        self._turned = 0
        self._use_length = 0
        self._heaps: dict[Kind, list[tuple[int, int, bytes]]] = {}
        self._entries = 0
        self._front: list[tuple[float, int, Kind]] = []
        self._front_stamp = -1

    def insert(self, header: BlockHeader) -> None:
        assert header.key not in self._blocks
        self._count_insert()
        uses, ghost = 1, self._ghosts.take(header.key)
        if ghost is not None:
            self._rates.came(ghost[0] - 1, ghost[1], self._stamp, 1)
            uses = min(ghost[0] + 1, CLASSES)
        self._rates.began(uses - 1, self._stamp, 1)
        octaves = math.log2(self._cost(header) / header.length)
        block = _Block(header, round(octaves * _STEPS), uses, self._stamp)
        self._blocks[header.key] = block

    def _count_insert(self) -> None:
        self._inserts += 1
        if self._inserts > INSERTS_PER_TOUCH:
            self.touch(())
        self._turn -= 1
        if self._turn <= 0:
            self._turn = len(self._blocks)
            self._use_length = (self._stamp - self._turned) // USES_PER_TURN
            self._turned = self._stamp

    def touch(self, keys: Iterable[bytes]) -> None:
        self._stamp = now = self._stamp + 1
        self._inserts = 0
        blocks, uses, since, count, new = self._blocks, 0, 0, 0, now - self._use_length
        for key in keys:
            block = blocks.get(key)
            while block is not None and block.stamp != now:
                block.stamp = now
                if block.since < new:
                    if block.uses != uses or block.since != since:
                        self._used(uses, since, count)  # a chain was mostly used as a whole
                        uses, since, count = block.uses, block.since, 0
                    count += 1
                    block.since = now
                    if uses < CLASSES:
                        block.uses = uses + 1
                block = blocks.get(block.parent)
        self._used(uses, since, count)
        self._rates.learn(now)

    def _used(self, uses: int, since: int, count: int) -> None:
        if count:
            self._rates.came(uses - 1, since, self._stamp, count)
            self._rates.began(min(uses + 1, CLASSES) - 1, self._stamp, count)

    def remove(self, key: bytes) -> None:
        if len(self._ghosts) < GHOSTS_PER_BLOCK * len(self._blocks):
            self._remember_more()
        block = self._blocks.pop(key)
        forgotten = self._ghosts.add(key, block.uses, block.since)
        if forgotten is not None:
            self._rates.lost(forgotten[0] - 1, forgotten[1], self._stamp, 1)
        if self._entries > 2 * len(self._blocks) + 64:
            self._compact()

    def _remember_more(self) -> None:
        """Start a larger memory; the few that the smaller one held are forgotten."""
        for uses, since in self._ghosts.all():
            self._rates.lost(uses - 1, since, self._stamp, 1)
        self._ghosts = Ghosts(GHOSTS_PER_BLOCK * len(self._blocks))

    def offer(self, key: bytes) -> None:
        block = self._blocks[key]
        if not block.offered:
            block.offered = True
            self._push(key, block)

    def victim(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        if self._front_stamp != self._stamp:
            self._front_stamp = self._stamp
            self._heaps = {kind: heap for kind, heap in self._heaps.items() if heap}
            oldest = [(heap[0][0], kind) for kind, heap in self._heaps.items()]
            self._front = [(self._value(kind, stamp), stamp, kind) for stamp, kind in oldest]
            heapq.heapify(self._front)
        while self._front:
            _, stamp, kind = self._front[0]
            heap = self._heaps[kind]
            if not heap:
                heapq.heappop(self._front)
            elif heap[0][0] != stamp:
                oldest_stamp = heap[0][0]
                value = self._value(kind, oldest_stamp)
                heapq.heapreplace(self._front, (value, oldest_stamp, kind))
            elif self._is_right(heap, kind, evictable):
                return heap[0][2]
        return None

    def _is_right(
        self,
        heap: list[tuple[int, int, bytes]],
        kind: Kind,
        evictable: Callable[[bytes], bool],
    ) -> bool:
        """Whether a heap's first entry is up to date and may go; else it is put right."""
        stamp, _, key = heap[0]
        block = self._blocks.get(key)
        if block is not None and block.offered and evictable(key):
            if block.since == stamp and (block.uses, block.cost) == kind:
                return True
            self._pop(heap)
            self._push(key, block)
            return False
        self._pop(heap)
        if block is not None:
            block.offered = False
        return False

    def _value(self, kind: Kind, stamp: int) -> float:
        age = self._stamp - stamp
        if not age:
            return math.inf  # the chain that is being asked for goes last
        uses, cost = kind
        return float(self._rates.rates[uses - 1][bin_of(age)] * 2.0 ** (cost / _STEPS))

    def _push(self, key: bytes, block: _Block) -> None:
        kind = (block.uses, block.cost)
        heap = self._heaps.setdefault(kind, [])
        heapq.heappush(heap, (block.since, -block.index, key))
        self._entries += 1
        if self._front_stamp == self._stamp and heap[0][2] == key:
            value = self._value(kind, block.since)
            heapq.heappush(self._front, (value, block.since, kind))

    def _pop(self, heap: list[tuple[int, int, bytes]]) -> None:
        heapq.heappop(heap)
        self._entries -= 1

    def _compact(self) -> None:
        """Drop the entries of blocks that are gone."""
        self._heaps, self._entries, self._front_stamp = {}, 0, -1
        for key, block in self._blocks.items():
            if block.offered:
                self._push(key, block)
