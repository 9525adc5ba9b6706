"""One segment file: its head, its records' rows, its index at the end.

Rows of the file that is being written are in memory; those of a sealed one are read from its index,
whenever they are asked for. It refuses to know which records are the newest.
"""

from __future__ import annotations

import threading

import msgspec
import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.kvstore.flash import records
from kvass.kvstore.flash.disk import DiskFile, page_memory
from kvass.kvstore.flash.records import FileHead, FileIndex, Origin
from kvass.kvstore.flash.table import hash_of

_Row = tuple[bytes, int, int, int, int, int, int]  # the key, then `_COLUMNS`
_COLUMNS = ("parent", "segment", "page", "pages", "origin", "index")
TAIL_READ = 128 << 10  # holds the index of most files, so that one read brings it


def name_of(sequence: int) -> str:
    """Return the name of a segment file."""
    return f"segment-{sequence:016x}"


class Segment:
    """Mutable fields: `_rows` and `_origins` while it is open, `sealed`; `live_pages` and
    `hot_pages` (of records that are the newest of their key; that were used since), which the log
    keeps; `_readers`, `_over`, under `_lock`: it is closed when its last reader has left."""

    def __init__(self, file: DiskFile, head: FileHead) -> None:
        self.file = file
        self.head = head
        self.sealed = False
        self.live_pages = 0
        self.hot_pages = 0
        self._rows: list[_Row] = []
        self._origins: dict[Origin, int] = {}
        self._origins_size = 0
        self._lock = threading.Lock()
        self._readers = 0
        self._over = False

    @property
    def sequence(self) -> int:
        return self.head.sequence

    # --- readers ---

    def enter(self) -> bool:
        """Keep the file open for a reader; False when it is gone."""
        with self._lock:
            self._readers += not self._over
            return not self._over

    def leave(self) -> None:
        """A reader is done."""
        with self._lock:
            self._readers -= 1
            last = self._over and not self._readers
        if last:
            self.file.close()

    def close(self) -> None:
        """Let nobody else in; the file is closed when nobody reads it any more."""
        with self._lock:
            assert not self._over
            self._over = True
            last = not self._readers
        if last:
            self.file.close()

    # --- records ---

    def room_after(self, end: int, header: BlockHeader) -> bool:
        """Say whether one more record, up to `end`, leaves room for the index."""
        origin = _origin_of(header)
        more = 0 if origin in self._origins else len(msgspec.msgpack.encode(origin))
        index = records.index_size(len(self._rows) + 1, self._origins_size + more)
        return end + index <= self.head.size

    def add(self, header: BlockHeader, page: int, pages: int) -> None:
        """Note a record that is in the file."""
        origin = _origin_of(header)
        if origin not in self._origins:
            self._origins[origin] = len(self._origins)
            self._origins_size += len(msgspec.msgpack.encode(origin))
        parent, segment = hash_of(header.parent), hash_of(header.segment_key)
        number = self._origins[origin]
        self._rows.append((header.key, parent, segment, page, pages, number, header.index))

    def forget(self) -> None:
        """It has no records that are known."""
        self._rows, self._origins, self._origins_size = [], {}, 0

    def keep(self, index: FileIndex) -> None:
        """Let these be the file's records."""
        if self.sealed:
            old = self.read_index()
            self._write(index, 0 if old is None else len(records.file_index(old, bytes(16))))
            return
        self._origins = {origin: number for number, origin in enumerate(index.origins)}
        self._origins_size = sum(len(msgspec.msgpack.encode(each)) for each in index.origins)
        keys = [row.tobytes() for row in index.rows["key"]]
        columns = (index.rows[name].tolist() for name in _COLUMNS)
        self._rows = list(zip(keys, *columns, strict=True))

    def index(self) -> FileIndex:
        """Return the file's records; raises Unavailable when they cannot be read."""
        if self.sealed:
            found = self.read_index()
            if found is None:
                raise Unavailable(f"flash: the index of {name_of(self.sequence)} is damaged")
            return found
        rows = np.empty(len(self._rows), dtype=records.ROW)
        if self._rows:
            keys, *columns = zip(*self._rows, strict=True)
            rows["key"] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(rows), -1)
            for name, column in zip(_COLUMNS, columns, strict=True):
                rows[name] = column
        return FileIndex(rows, list(self._origins))

    def seal(self) -> None:
        """Write the index, and make the file last: no index before what it names."""
        self.file.sync()
        index = self.index()
        self._write(index, 0)
        self.sealed = True
        self.forget()

    def _write(self, index: FileIndex, at_least: int) -> None:
        """Write an index, over all of one that had `at_least` bytes."""
        data = records.file_index(index, self.head.file_id)
        pages = page_memory(max(len(data), at_least))
        pages[len(pages) - len(data) :] = data
        self.file.write(self.head.size - len(pages), pages)
        self.file.sync()

    def read_index(self) -> FileIndex | None:
        """Read the index of a file that is sealed; None when it has no whole one."""
        size = min(TAIL_READ, self.head.size)
        while True:
            data = page_memory(size)
            if self.file.read(self.head.size - size, data) < size:
                return None
            room = records.index_room(data, self.head.file_id)
            if not room or room > self.head.size:
                return None
            if room <= size:
                return records.read_index(data[size - room :], self.head.file_id)
            size = room


def _origin_of(header: BlockHeader) -> Origin:
    return Origin(header.namespace, header.tenant, header.writer)
