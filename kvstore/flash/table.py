"""Which key is where on flash, in 17 bytes a slot of an open-addressing table. Pure.

It holds 64 bits of a key and where its record is; the record has the key, which is compared on
every read. Keys are cryptographic hashes, so any 64 bits of one are as good as random. Not safe for
threads: the log has a lock around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvass.common.keys import KEY_BYTES

U64 = NDArray[np.uint64]
Chosen = Callable[[U64], NDArray[np.bool_]]  # segments, by the first bytes of their keys
_EMPTY, _GONE = np.uint64(0), np.uint64(1)
LOAD_MAX = 0.75  # beyond it chains of occupied slots grow long
SLOTS_MIN = 1 << 10
USES_MAX = 255

# A place: sequence of the file, first page, pages. A record has at most 256 MiB, a file 4 GiB.
PAGES_BITS, PAGE_BITS = 16, 20
PAGES_MAX, PAGE_MAX = (1 << PAGES_BITS) - 1, (1 << PAGE_BITS) - 1


def place_of(sequence: int, page: int, pages: int) -> int:
    """Return a record's place as one number; never 0, for no record begins on page 0."""
    assert 0 < page <= PAGE_MAX and 0 < pages <= PAGES_MAX
    return (sequence << PAGE_BITS | page) << PAGES_BITS | pages


def sequence_in(place: int) -> int:
    return place >> PAGE_BITS + PAGES_BITS


def page_in(place: int) -> int:
    return place >> PAGES_BITS & PAGE_MAX


def pages_in(place: int) -> int:
    return place & PAGES_MAX


def hash_of(key: bytes) -> int:
    """Return the part of one key that the table holds."""
    return max(int.from_bytes(key[:8], "little"), int(_GONE) + 1)


def hashes_of(keys: Sequence[bytes]) -> U64:
    """Return the part of each key that the table holds."""
    joined = b"".join(keys)
    assert len(joined) == KEY_BYTES * len(keys)
    return hashes_in(np.frombuffer(joined, dtype=np.uint8).reshape(-1, KEY_BYTES))


def hashes_in(keys: NDArray[np.uint8]) -> U64:
    """As `hashes_of`, of keys as rows."""
    words = np.ascontiguousarray(keys[:, :8]).view("<u8").reshape(-1)
    hashes: U64 = np.maximum(words, _GONE + np.uint64(1))
    return hashes


class Table:
    """Mutable fields: `_hashes`, `_places`, `_uses` by slot; `_used` (slots that are not empty),
    `count` (of keys)."""

    def __init__(self, slots: int = SLOTS_MIN) -> None:
        self._new(slots)

    def _new(self, slots: int) -> None:
        assert slots & slots - 1 == 0
        self._hashes = np.zeros(slots, dtype=np.uint64)
        self._places = np.zeros(slots, dtype=np.uint64)
        self._uses = np.zeros(slots, dtype=np.uint8)
        self._used = 0
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        return self._hashes.nbytes + self._places.nbytes + self._uses.nbytes

    def find(self, hashes: U64) -> U64:
        """Return the place of each key; 0 of one that is not here."""
        slots = self._slots(hashes)
        return np.where(slots >= 0, self._places[slots], _EMPTY)

    def use(self, hashes: U64) -> U64:
        """Count a use of each key; returns the places of those that were not used before."""
        slots = np.unique(self._slots(hashes))
        slots = slots[slots >= 0]
        fresh: U64 = self._places[slots[self._uses[slots] == 0]]
        self._uses[slots] += self._uses[slots] < USES_MAX
        return fresh

    def uses(self, hashes: U64) -> NDArray[np.uint8]:
        """Return how often each key was used since it was put; 0 of one that is not here."""
        slots = self._slots(hashes)
        return np.where(slots >= 0, self._uses[slots], np.uint8(0))

    def put(self, hashes: U64, places: U64) -> U64:
        """Set the places of keys, each unused; of one that comes twice the last counts. Returns the
        places they had before (0: none)."""
        before = np.zeros(len(hashes), dtype=np.uint64)
        last = len(hashes) - 1 - np.unique(hashes[::-1], return_index=True)[1]
        self._make_room(len(last))
        slots = self._slots(hashes[last])
        known, new = last[slots >= 0], last[slots < 0]
        before[known] = self._places[slots[slots >= 0]]
        self._places[slots[slots >= 0]] = places[known]
        self._uses[slots[slots >= 0]] = 0
        self._insert(hashes[new], places[new])
        return before

    def remove(self, hashes: U64, places: U64) -> NDArray[np.bool_]:
        """Forget keys that still are where `places` says; returns which were."""
        slots = self._slots(hashes)
        there: NDArray[np.bool_] = (slots >= 0) & (self._places[slots] == places)
        gone = np.unique(slots[there])
        self._hashes[gone] = _GONE
        self._places[gone] = 0
        self.count -= len(gone)
        return there

    def count_in(self, sequence: int) -> int:
        """Return how many keys have their records in one file: a look at all slots."""
        return int(self._in_file(sequence).sum())

    def remove_file(self, sequence: int) -> None:
        """Forget every key whose record is in one file: a look at all slots."""
        gone = self._in_file(sequence)
        self._hashes[gone] = _GONE
        self._places[gone] = 0
        self.count -= int(gone.sum())

    def _in_file(self, sequence: int) -> NDArray[np.bool_]:
        bits = np.uint64(PAGE_BITS + PAGES_BITS)
        found: NDArray[np.bool_] = self._places >> bits == np.uint64(sequence)
        return found & (self._hashes > _GONE)

    def _slots(self, hashes: U64) -> NDArray[np.int64]:
        """Return each key's slot, or -1: all keys step on together until each has met its own or an
        empty slot."""
        mask = np.uint64(len(self._hashes) - 1)
        found = np.full(len(hashes), -1, dtype=np.int64)
        at = (hashes & mask).astype(np.int64)
        left = np.arange(len(hashes))
        while len(left):
            here = self._hashes[at]
            met = here == hashes[left]
            found[left[met]] = at[met]
            on = ~met & (here != _EMPTY)
            left, at = left[on], (at[on] + 1) & int(mask)
        return found

    def _insert(self, hashes: U64, places: U64) -> None:
        """Put keys that are different, and not here, into empty slots."""
        mask = len(self._hashes) - 1
        at = (hashes & np.uint64(mask)).astype(np.int64)
        left = np.arange(len(hashes))
        self.count += len(left)
        self._used += len(left)
        while len(left):
            free = self._hashes[at] == _EMPTY
            # Of several that want one slot, the one that wrote last has it.
            self._hashes[at[free]] = hashes[left[free]]
            won = free & (self._hashes[at] == hashes[left])
            self._places[at[won]] = places[left[won]]
            self._uses[at[won]] = 0
            left, at = left[~won], (at[~won] + 1) & mask

    def _make_room(self, more: int) -> None:
        """Grow, or sweep out what is gone, before the load gets too high."""
        if self._used + more <= LOAD_MAX * len(self._hashes):
            return
        live = self._hashes > _GONE
        hashes, places, uses = self._hashes[live], self._places[live], self._uses[live]
        slots = SLOTS_MIN
        while self.count + more > LOAD_MAX * slots * 0.75:  # so that it does not grow at once again
            slots *= 2
        self._new(slots)
        self._insert(hashes, places)
        self._uses[self._slots(hashes)] = uses
