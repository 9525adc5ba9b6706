"""Which records there are, and in which files: what readers and the writer share, under one
lock."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.common.pacing import Pacing
from kvass.kvstore.flash import records, table
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.fetched import Fetched
from kvass.kvstore.flash.segment import Segment
from kvass.kvstore.flash.table import U64, Table

_log = logging.getLogger(__name__)


class Catalog:
    """Mutable fields: `segments` by sequence, `_table`, `counts`, `_pacing` (of lines about corrupt
    blocks); all under `_lock`."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.counts: Counter[str] = Counter()
        self._table = Table()
        self._pacing = Pacing()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    @property
    def index_bytes(self) -> int:
        """Memory that the table of all keys takes."""
        return self._table.size_bytes

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return each key's place, 0 of one that is not here; a read may still miss."""
        with self._lock:
            places: list[int] = self._table.find(table.hashes_of(keys)).tolist()
        return places

    def use(self, keys: Sequence[bytes]) -> None:
        """These were asked for: they are copied forward when their file is given back."""
        with self._lock:
            for place in self._table.use(table.hashes_of(keys)).tolist():
                segment = self.segments.get(table.sequence_in(place))
                if segment is not None:
                    segment.hot_pages += table.pages_in(place)

    def read(self, key: bytes, place: int, buffer: memoryview) -> Fetched | None:
        """Read a record into `buffer` (page memory, of the place's pages at least); None when it
        is not, or not any more, the key's, or cannot be read. Any thread."""
        with self._lock:
            segment = self.segments.get(table.sequence_in(place))
            if segment is None or not segment.enter():
                return None
        room = buffer[: table.pages_in(place) * PAGE]
        at = table.page_in(place) * PAGE
        try:
            count = segment.file.read(at, room)
        except Unavailable as error:
            self.fault("read", error)
            return None
        finally:
            segment.leave()
        record = None
        if count == len(room):
            record = records.read_record(room, segment.head.file_id, at)
        if record is None or not isinstance(record.content, BlockHeader):
            self.found_wrong(key, place)
            return None
        header = record.content
        if header.key != key or record.pages * PAGE != len(room):
            return None  # two keys whose first bytes are the same: this one is not here
        return Fetched(header, room[record.payload_at : record.payload_at + header.length])

    def read_all(self, places: Mapping[bytes, int], buffer: memoryview) -> dict[bytes, Fetched]:
        """As `read`, of several records, one after the other, each into its part of `buffer`; what
        cannot be had is not in the answer."""
        fetched: dict[bytes, Fetched] = {}
        start = 0
        for key, place in places.items():
            stop = start + table.pages_in(place) * PAGE
            found = self.read(key, place, buffer[start:stop])
            if found is not None:
                fetched[key] = found
            start = stop
        return fetched

    def found_wrong(self, key: bytes, place: int) -> None:
        """What was read there is not what was written: nobody finds it any more."""
        if self.remove(table.hashes_of([key]), np.array([place], dtype=np.uint64)).any():
            self.counts["corrupt"] += 1  # else it was dropped or freed while it was read
            with self._lock:
                more = self._pacing.more(time.monotonic())
            if more is not None:
                text = "flash: block %s is corrupt; it is not found any more%s"
                _log.error(text, key.hex(), more)

    def put(self, hashes: U64, places: U64) -> None:
        """Let these be the newest records of their keys; of one that comes twice, the last."""
        with self._lock:
            for place in places.tolist():
                self.segments[table.sequence_in(place)].live_pages += table.pages_in(place)
            before = self._table.put(hashes, places)
            lasting = self._table.find(hashes)
            self._unlive(before[before > 0].tolist())
            self._unlive(places[lasting != places].tolist())

    def remove(self, hashes: U64, places: U64) -> NDArray[np.bool_]:
        """Forget the keys that are still at these places; returns which were."""
        with self._lock:
            there = self._table.remove(hashes, places)
            self._unlive(places[there].tolist())
        return there

    def remove_file(self, sequence: int) -> None:
        """Forget every key of a file whose index cannot be read."""
        with self._lock:
            self._table.remove_file(sequence)
            self.segments[sequence].live_pages = 0

    def count_in(self, sequence: int) -> int:
        """Return how many keys have their newest records in one file."""
        with self._lock:
            return self._table.count_in(sequence)

    def newest(self, hashes: U64, places: U64) -> NDArray[np.bool_]:
        """Say which records are the newest of their keys."""
        with self._lock:
            newest: NDArray[np.bool_] = self._table.find(hashes) == places
        return newest

    def hot(self, hashes: U64, places: U64) -> NDArray[np.bool_]:
        """Say which records are the newest of their keys, and used since they were written."""
        with self._lock:
            hot: NDArray[np.bool_] = (self._table.find(hashes) == places) & (
                self._table.uses(hashes) > 0
            )
        return hot

    def fault(self, what: str, error: Exception) -> None:
        """Count a fault of the disk; who steps aside for it says so."""
        self.counts[f"{what}_faults"] += 1
        _log.debug("%s", error)

    def _unlive(self, places: Iterable[int]) -> None:
        for place in places:
            segment = self.segments.get(table.sequence_in(place))
            if segment is not None:
                segment.live_pages -= table.pages_in(place)


def places_of(segment: Segment, rows: records.Rows) -> U64:
    """Return the places of a file's rows, as the table has them."""
    first = np.uint64(segment.sequence << table.PAGE_BITS)
    bits = np.uint64(table.PAGES_BITS)
    places: U64 = (first + rows["page"].astype(np.uint64)) << bits | rows["pages"].astype(np.uint64)
    return places
