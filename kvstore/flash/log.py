"""The log: append, sync, drop, and room for what comes next.

One thread at a time calls this; any number reads through the catalog. A record is found only when
it is in its file; it lasts through a power cut when it is synced, at the latest after
`unsynced_bytes` more, or one file more where that is less.

    append ──> file full: its index is written, the next file (made meanwhile) begun
                 └─ no room for another: the oldest one is given back, after its records that were
                    used since they were written have been copied forward

A drop is first written down, then its blocks are overwritten, in every file, also those that newer
records have replaced; a crash in between is made good by the next start. Faults of the disk are
Unavailable to who writes, and a miss to who reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec
import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.errors import Invalid, Unavailable
from kvass.kvstore.flash import records, recovery, table
from kvass.kvstore.flash.appender import BUFFER_BYTES, Appender
from kvass.kvstore.flash.background import Background
from kvass.kvstore.flash.catalog import Catalog, places_of
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory
from kvass.kvstore.flash.records import DropOrder, FileHead, FileIndex
from kvass.kvstore.flash.segment import Segment, name_of

_log = logging.getLogger(__name__)

SEGMENTS_MIN = 3  # one being written, one to be given back, and the one that is spare in between
# Of a file: write amplification stays below two.
COPY_SHARE = 0.5
DROP_KEYS_MAX = 4096  # of one note of a drop: 128 KiB
SEGMENT_MAX = 1 << 30  # one that was not sealed is read whole at a start


@dataclass(frozen=True, slots=True)
class LogSettings:
    """All in bytes."""

    flash_bytes: int
    segment_bytes: int
    unsynced_bytes: int
    buffer_bytes: int = BUFFER_BYTES

    def __post_init__(self) -> None:
        size = self.segment_bytes
        if size % PAGE or not 4 * PAGE <= size <= SEGMENT_MAX:
            raise Invalid(
                f"flash: segments of {size} bytes; expected whole pages of {PAGE}, up to "
                f"{SEGMENT_MAX}"
            )
        if self.flash_bytes < SEGMENTS_MIN * size:
            raise Invalid(
                f"flash: {self.flash_bytes} bytes hold fewer than {SEGMENTS_MIN} segments of {size}"
            )


class FlashLog:
    """Mutable fields: `catalog` (all files but `_current` are sealed, or given up after a fault),
    `_current`, `_appender`, `_added` (records on their way to the file), `_next`,
    `_background` (the files before and after `_current`)."""

    def __init__(
        self,
        disk: Disk,
        settings: LogSettings,
        threads: Executor,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Rebuild from what is on the disk; raises Unavailable. `threads` runs the writes."""
        self.catalog = Catalog()
        self._disk = disk
        self._settings = settings
        self._random_bytes = random_bytes
        # The file before the current one may not be synced yet.
        unsynced = settings.unsynced_bytes - settings.segment_bytes
        self._appender = Appender(threads, unsynced, settings.buffer_bytes)
        self._background = Background(disk, threads, settings.segment_bytes)
        self._current: Segment | None = None
        self._added: list[tuple[bytes, int]] = []
        self._zeros = page_memory(1 << 20)
        self._next = 1
        self._rebuild()

    def _rebuild(self) -> None:
        found = recovery.recover(self._disk)
        for each in found:
            self.catalog.segments[each.segment.sequence] = each.segment
            self._next = each.segment.sequence + 1
            rows = each.index.rows
            self.catalog.put(table.hashes_in(rows["key"]), places_of(each.segment, rows))
        for each in found:
            for page, order in each.drops.items():
                self._finish_drop(order, each.segment, page)
        for each in found:
            if not each.segment.sealed and each.segment.sequence in self.catalog.segments:
                each.segment.seal()
        while self._used_bytes() > self._settings.flash_bytes:  # it was given more before
            self._free(self._victim())

    @property
    def total_bytes(self) -> int:
        """What its files may take together."""
        return self._settings.flash_bytes

    def sequences(self) -> list[int]:
        """Return which files there are, oldest first."""
        return sorted(self.catalog.segments)

    def keys_in(self, sequence: int) -> list[bytes]:
        """Return the keys whose newest records are in one file; raises Unavailable."""
        segment = self.catalog.segments.get(sequence)
        if segment is None:
            return []
        rows = self._index_of(segment).rows
        newest = self.catalog.newest(table.hashes_in(rows["key"]), places_of(segment, rows))
        return [row.tobytes() for row in rows["key"][newest]]

    # --- appending ---

    def append(self, blocks: Iterable[tuple[BlockHeader, memoryview]]) -> int:
        """Write blocks; they are found after `flush` at the latest. Returns how many fitted. Raises
        Unavailable when the disk fails: what was found before still is."""
        try:
            count = sum(self._add(header, payload, "appended") for header, payload in blocks)
            self._publish()
        except Unavailable as error:
            self._give_up(error)
            raise
        return count

    def flush(self) -> None:
        """Let everything that was appended be found; raises Unavailable."""
        self._end(self._appender.flush)

    def sync(self) -> None:
        """As `flush`, and it lasts."""
        self._end(self._appender.sync)

    def _end(self, write: Callable[[], None]) -> None:
        try:
            if self._current is not None:
                write()
                self._publish()
            self._background.settle()
        except Unavailable as error:
            self._give_up(error)
            raise

    def close(self) -> None:
        """Sync, and let go of the files."""
        try:
            self.sync()
            self._background.close()
        except Unavailable as error:
            _log.error("%s: what was not synced may be lost", error)
        for segment in self.catalog.segments.values():
            segment.close()
        self.catalog.segments.clear()
        self._disk.close()

    def _add(self, header: BlockHeader, payload: memoryview, why: str) -> bool:
        pages = records.record_pages(header)
        alone = PAGE * (1 + pages) + records.index_size(1, 1 << 12)
        if alone > self._settings.segment_bytes or pages > table.PAGES_MAX:
            self.catalog.counts["too_large"] += 1
            return False
        segment = self._room(header, pages)
        at = self._appender.position
        segment.add(header, at // PAGE, pages)
        self._added.append((header.key, table.place_of(segment.sequence, at // PAGE, pages)))
        self._appender.add(records.record_head(header, segment.head.file_id, at))
        self._appender.add(payload)
        self._appender.pad()
        self.catalog.counts[f"{why}_blocks"] += 1
        self.catalog.counts[f"{why}_bytes"] += pages * PAGE
        return True

    def _publish(self) -> None:
        """Let what is in the file by now be found."""
        page = self._appender.written // PAGE
        ends = (table.page_in(place) + table.pages_in(place) for _, place in self._added)
        count = sum(end <= page for end in ends)
        if not count:
            return
        keys, places = zip(*self._added[:count], strict=True)
        del self._added[:count]
        self.catalog.put(table.hashes_of(keys), np.array(places, dtype=np.uint64))

    def _room(self, header: BlockHeader, pages: int) -> Segment:
        """Return a file that has room for one more record, at the appender's position."""
        while self._current is None or not self._current.room_after(
            self._appender.position + pages * PAGE, header
        ):
            self._turn()
        return self._current

    def _turn(self) -> None:
        """Seal the file, begin the next, and give one back when that was the last there was room
        for."""
        if self._current is not None:
            # Not the current one any more: a fault on the way leaves it as one given up.
            segment, self._current = self._current, None
            self._appender.flush()
            self._publish()
            self._background.seal(segment)
        while self._is_full():  # a fault came between the last file and the room for this one
            self._free(self._victim())
        file = self._background.take(name_of(self._next))
        sequence, self._next = self._next, self._next + 1
        file_id = self._random_bytes(records.ID_BYTES)
        segment = Segment(file, FileHead(file_id, sequence, self._settings.segment_bytes))
        self.catalog.segments[sequence] = segment
        self._current = segment
        self._appender.start(segment.file)
        self._appender.add(records.file_head(segment.head))
        if self._is_full():
            self._clean(self._victim())
        self._background.make(name_of(self._next))

    def _is_full(self) -> bool:
        """Say whether there is no room for another file."""
        return self._used_bytes() + self._settings.segment_bytes > self._settings.flash_bytes

    def _used_bytes(self) -> int:
        return sum(each.head.size for each in self.catalog.segments.values())

    def _give_up(self, error: Unavailable) -> None:
        """The file's end is in doubt: what is found stays, nothing more is appended to it."""
        self.catalog.fault("write", error)
        self._current = None
        self._added.clear()
        self._appender.give_up()

    # --- giving files back ---

    def _victim(self) -> Segment:
        """Return the oldest file, or one that holds nothing any more."""
        files = (each for each in self.catalog.segments.values() if each is not self._current)
        return min(files, key=lambda each: (each.live_pages > 0, each.sequence))

    def _clean(self, segment: Segment) -> None:
        """Copy what is worth it forward, then give the file back."""
        if segment.hot_pages:
            self._copy_forward(segment)
            self._appender.sync()
            self._publish()
        self._free(segment)

    def _copy_forward(self, segment: Segment) -> None:
        rows = self._index_of(segment).rows
        places = places_of(segment, rows)
        hot = self.catalog.hot(table.hashes_in(rows["key"]), places)
        left = int(self._settings.segment_bytes * COPY_SHARE)
        for row, place in zip(rows[hot], places[hot].tolist(), strict=True):
            size = table.pages_in(place) * PAGE
            left -= size
            if left < 0:
                break
            key = row["key"].tobytes()
            fetched = self.catalog.read(key, place, page_memory(size))
            if fetched is None:
                continue
            if fetched.copy_to(fetched.payload):
                self._add(fetched.header, fetched.payload, "copied")
            else:
                self.catalog.found_wrong(key, place)

    def _free(self, segment: Segment) -> None:
        try:
            rows = self._index_of(segment).rows
        except Unavailable:
            self.catalog.remove_file(segment.sequence)
        else:
            self.catalog.remove(table.hashes_in(rows["key"]), places_of(segment, rows))
        # Until it is gone from the disk it must be known: a drop has to reach it.
        self._disk.remove(name_of(segment.sequence))
        del self.catalog.segments[segment.sequence]
        segment.close()
        self.catalog.counts["freed_files"] += 1

    def _index_of(self, segment: Segment) -> FileIndex:
        """Return a file's records, also when its index is damaged; raises Unavailable."""
        self._background.settle(segment)
        try:
            return segment.index()
        except Unavailable as error:
            _log.error("%s; it is made anew from what is in the file", error)
        found = recovery.read_through(segment)
        segment.seal()
        return found.index

    # --- erasing ---

    def drop(self, order: DropOrder) -> int:
        """Erase blocks, for good, when this returns; returns how many were found. Raises
        Unavailable when not all of it could be done."""
        try:
            return sum(self._drop(part) for part in _parts(order))
        except Unavailable as error:
            self._give_up(error)
            raise

    def _drop(self, order: DropOrder) -> int:
        try:
            segment, page = self._note(order)
        except Unavailable as error:  # a full disk takes no note; to overwrite needs no room
            self._give_up(error)
            return sum(self._erase(each, order) for each in self._files())
        return self._finish_drop(order, segment, page)

    def _files(self) -> list[Segment]:
        return list(self.catalog.segments.values())

    def _note(self, order: DropOrder) -> tuple[Segment, int]:
        """Write down, so that it lasts, what is about to be erased."""
        nobody = BlockHeader(bytes(32), b"", b"", 0, b"", "", "", 0, 0, ())
        segment = self._room(nobody, records.record_pages(order))
        at = self._appender.position
        self._appender.add(records.record_head(order, segment.head.file_id, at))
        self._appender.pad()
        self._appender.sync()
        self._publish()
        return segment, at // PAGE

    def _finish_drop(self, order: DropOrder, noted_in: Segment, page: int) -> int:
        """Erase what was written before the note, then the note."""
        count = 0
        for segment in self._files():
            if segment.sequence <= noted_in.sequence:
                before = page if segment is noted_in else table.PAGE_MAX
                count += self._erase(segment, order, before)
        if noted_in.sequence in self.catalog.segments:
            self._overwrite(noted_in, page, records.record_pages(order))
            noted_in.file.sync()
        self.catalog.counts["dropped"] += count
        return count

    def _erase(self, segment: Segment, order: DropOrder, before: int = table.PAGE_MAX) -> int:
        index = self._index_of(segment)
        chosen = order.matches(index.rows, index.origins) & (index.rows["page"] < before)
        if not chosen.any():
            return 0
        rows = index.rows[chosen]
        there = self.catalog.remove(table.hashes_in(rows["key"]), places_of(segment, rows))
        # The file with the note must stay until the rest is done.
        if chosen.all() and segment.sealed:
            self._free(segment)
        else:
            for row in rows:
                self._overwrite(segment, int(row["page"]), int(row["pages"]))
            segment.file.sync()
            segment.keep(index.without(chosen))
        return int(there.sum())

    def _overwrite(self, segment: Segment, page: int, pages: int) -> None:
        at, end = page * PAGE, (page + pages) * PAGE
        while at < end:
            size = min(end - at, len(self._zeros))
            segment.file.write(at, self._zeros[:size])
            at += size


def _parts(order: DropOrder) -> list[DropOrder]:
    """Cut a drop by keys into notes of bounded size."""
    if order.keys is None:
        return [order]
    starts = range(0, len(order.keys), DROP_KEYS_MAX)
    return [
        msgspec.structs.replace(order, keys=order.keys[at : at + DROP_KEYS_MAX]) for at in starts
    ]
