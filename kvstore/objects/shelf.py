"""Which objects a bucket has, and which block is in which: in memory, from names alone. Pure.

A block takes 17 bytes of a table as flash has it (`flash/table.py`), and its part of its object's
entry: 50 bytes together. What is there for longest without being used goes first, as far as this
node knows: of others' uses it hears nothing. It refuses to know where a bucket is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvass.kvstore.flash import table
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.table import Table
from kvass.kvstore.objects.contents import stride_in
from kvass.kvstore.objects.names import ObjectName, is_under, parts_of, read_name

LOOKED_MAX = 10_000  # objects, for one that is to go: most may be other nodes'


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a listing shows it."""

    name: str
    size_bytes: int
    age_s: float


@dataclass(slots=True)
class _Object:
    """Mutable fields: `used_s`, `round` (of the last listing that showed it)."""

    name: str
    size_bytes: int
    used_s: float
    round: int


class Shelf:
    """Mutable fields: `used_bytes`, `_objects` by number, `_numbers` by name, `_table` (places are
    an object's number, a block's place in it and one more, and the pages it takes), `_oldest` (a
    heap of times and numbers; a time that is not its object's any more is too early), `_next`,
    `_round`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._objects: dict[int, _Object] = {}
        self._numbers: dict[str, int] = {}
        self._table = Table()
        self._oldest: list[tuple[float, int]] = []
        self._next = 1
        self._round = 0
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def blocks(self) -> int:
        return len(self._table)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return each key's place, 0 of one that is not here."""
        places: list[int] = self._table.find(table.hashes_of(keys)).tolist()
        return places

    def where(self, place: int) -> tuple[str, int, int] | None:
        """Return a place's object, and the range of its bytes; None when it is there no more."""
        found = self._objects.get(table.sequence_in(place))
        if found is None:
            return None
        size = table.pages_in(place) * PAGE
        at = (table.page_in(place) - 1) * size
        return found.name, at, at + size

    def use(self, places: Iterable[int], now_s: float) -> None:
        """These are asked for."""
        for number in {table.sequence_in(place) for place in places}:
            if number in self._objects:
                self._objects[number].used_s = now_s

    def add(self, listed: Sequence[Listed], now_s: float) -> list[str]:
        """Take in objects; returns the names of those that cannot be what they are called."""
        wrong: list[str] = []
        hashes: list[int] = []
        places: list[int] = []
        for each in listed:
            known = self._objects.get(self._numbers.get(each.name, 0))
            if known is not None:
                known.round = self._round
                continue
            name = read_name(each.name, self.root)
            if name is None:
                continue  # somebody else's: let it be
            stride = stride_in(each.size_bytes, len(name.blocks))
            if not stride:
                wrong.append(each.name)
                continue
            number, self._next = self._next, self._next + 1
            used_s = now_s - max(each.age_s, 0.0)
            self._objects[number] = _Object(each.name, each.size_bytes, used_s, self._round)
            self._numbers[each.name] = number
            heapq.heappush(self._oldest, (used_s, number))
            self.used_bytes += each.size_bytes
            hashes += name.blocks
            places += _places(number, len(name.blocks), stride)
        self._table.put(np.array(hashes, dtype=np.uint64), np.array(places, dtype=np.uint64))
        return wrong

    def remove(self, name: str) -> None:
        """Forget an object, if it is here."""
        number = self._numbers.pop(name, None)
        if number is None:
            return
        gone = self._objects.pop(number)
        self.used_bytes -= gone.size_bytes
        blocks = self._said(gone).blocks
        stride = stride_in(gone.size_bytes, len(blocks))
        places = np.array(_places(number, len(blocks), stride), dtype=np.uint64)
        self._table.remove(np.array(blocks, dtype=np.uint64), places)

    # --- listings, drops, room ---

    def begin_listing(self) -> None:
        """A listing begins: what it does not show, and was here before, is gone."""
        self._round += 1

    def end_listing(self) -> None:
        """Forget what the listing that was begun last did not show."""
        for each in [each for each in self._objects.values() if each.round < self._round]:
            self.remove(each.name)

    def matching(self, order: DropOrder) -> list[str]:
        """Return the objects that a drop erases."""
        if order.keys is None:
            among: Iterable[_Object] = self._objects.values()
        else:
            places = self._table.find(table.hashes_of(order.keys)).tolist()
            numbers = {table.sequence_in(place) for place in places}
            among = (self._objects[number] for number in numbers if number in self._objects)
        wanted = parts_of(order)
        return [each.name for each in among if is_under(each.name, wanted)]

    def upon(self, names: Iterable[str], keys: Sequence[bytes]) -> list[str]:
        """Return the objects, besides these, that hold one of these blocks, or one that was
        computed upon them or upon blocks of these objects. It looks at every name."""
        wrong = set(table.hashes_of(keys).tolist())
        said = {each.name: self._said(each) for each in self._objects.values()}
        for name in names:
            wrong.update(said.pop(name).blocks)
        chosen: list[str] = []
        is_news = True
        while is_news:  # one segment further down the chains each time
            fresh = [
                name
                for name, of in said.items()
                if of.parent in wrong or not wrong.isdisjoint(of.blocks)
            ]
            for name in fresh:
                wrong.update(said.pop(name).blocks)
            chosen += fresh
            is_news = bool(fresh)
        return chosen

    def oldest(self, size_bytes: int, mine: Callable[[bytes], bool]) -> list[str]:
        """Return the objects that are to go so that so many bytes come back, of segments that are
        `mine`; not enough when there are no more."""
        chosen: list[str] = []
        looked: list[tuple[float, int]] = []
        while self._oldest and size_bytes > 0 and len(looked) < LOOKED_MAX:
            used_s, number = heapq.heappop(self._oldest)
            found = self._objects.get(number)
            if found is None:
                continue
            if found.used_s > used_s:
                heapq.heappush(self._oldest, (found.used_s, number))
                continue
            looked.append((used_s, number))
            if mine(self._said(found).segment_key):
                chosen.append(found.name)
                size_bytes -= found.size_bytes
        for each in looked:
            heapq.heappush(self._oldest, each)
        return chosen

    def _said(self, known: _Object) -> ObjectName:
        name = read_name(known.name, self.root)
        assert name is not None
        return name


def _places(number: int, blocks: int, stride: int) -> list[int]:
    return [table.place_of(number, 1 + at, stride // PAGE) for at in range(blocks)]
