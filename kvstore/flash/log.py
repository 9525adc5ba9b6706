"""The log: append, sync, drop, and room for what comes next.

One thread at a time calls this; any number reads through the catalog. A record is found only when
it is in its file; it lasts through a power cut when it is synced, at the latest after
`unsynced_bytes` more, or one file more where that is less.

    append ──> file full: its index is written, the next file (made meanwhile) begun
                 └─ no room for another: the oldest one is given back, after its records that were
                    used since they were written have been copied forward, and last. On a disk that
                    is full they wait in memory meanwhile: there is no file yet to copy them to

A drop is first written down, then its blocks are overwritten, in every file, also those that newer
records have replaced; a crash in between is made good by the next start. Faults of the disk are
Unavailable to who writes, and a miss to who reads: the file that met one is given up, and `sync`
says that all lasts only after it has read that file again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor

import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.kvstore.flash import records, table
from kvass.kvstore.flash.appender import Appender
from kvass.kvstore.flash.background import Background
from kvass.kvstore.flash.catalog import Catalog, places_of
from kvass.kvstore.flash.disk import PAGE, Disk, DiskFile, page_memory
from kvass.kvstore.flash.files import Files
from kvass.kvstore.flash.folder import DiskFull
from kvass.kvstore.flash.notes import Notes
from kvass.kvstore.flash.records import DropOrder, FileHead, FileIndex
from kvass.kvstore.flash.recovery import Found
from kvass.kvstore.flash.segment import Segment, name_of
from kvass.kvstore.flash.settings import LogSettings

_log = logging.getLogger(__name__)

# Of a file: write amplification stays below two.
COPY_SHARE = 0.5


class FlashLog:
    """Mutable fields: `notes`, `catalog` (all files but `_current` and the last one are sealed, or
    given up after a fault), `_current`, `_appender`, `_added` (records on their way to the file),
    `_next`, `_renewals` (of the folder, seen), `_background` (the files before and after
    `_current`)."""

    def __init__(
        self,
        disk: Disk,
        settings: LogSettings,
        threads: Executor,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Rebuild from what is on the disk; raises Unavailable. `threads` runs the writes."""
        self.catalog = Catalog()
        self.notes = Notes(disk)
        self._disk = disk
        self._settings = settings
        self._random_bytes = random_bytes
        # The file before the current one may not be synced yet.
        unsynced = settings.unsynced_bytes - settings.segment_bytes
        self._appender = Appender(threads, unsynced, settings.buffer_bytes)
        self._background = Background(disk, threads, settings.segment_bytes)
        limits = (settings.flash_bytes, settings.files_max)
        self._files = Files(disk, self.catalog, self._background, *limits)
        self._current: Segment | None = None
        self._added: list[tuple[bytes, int]] = []
        self._zeros = page_memory(1 << 20)
        self._next = 1
        self._renewals = disk.renewals
        try:
            self._rebuild(self._files.recover(settings.segment_bytes))
        except BaseException:
            self._files.close()
            raise

    def _rebuild(self, found: list[Found]) -> None:
        for each in found:
            self._next = each.segment.sequence + 1
            rows = each.index.rows
            self.catalog.put(table.hashes_in(rows["key"]), places_of(each.segment, rows))
        if self._files.unopened and any(each.drops for each in found):
            raise Unavailable(
                "flash: an erasure that was cut off must be finished in all files, and not all may "
                "be open: raise the limit of open files"
            )
        for each in found:
            for page, order in each.drops.items():
                self._finish_drop(order, each.segment, page)
        for each in found:
            if not each.segment.sealed and each.segment.sequence in self.catalog.segments:
                each.segment.seal()
        while self._files.used_bytes() > self.total_bytes:  # it was given more before
            self._files.free(self._files.victim(None))

    @property
    def total_bytes(self) -> int:
        """What its files may take together."""
        return self._files.limit_bytes

    @property
    def unopened(self) -> int:
        """How many files could not be opened: they are kept, not served, and not erased."""
        return self._files.unopened

    def sequences(self) -> list[int]:
        """Return which files there are, oldest first."""
        return sorted(self.catalog.segments)

    def indexes(self) -> Iterator[FileIndex]:
        """Return each file's records, newer and older ones of a block alike; raises Unavailable."""
        return map(self._files.index_of, self._files.all())

    def keys_in(self, sequence: int, chosen: table.Chosen | None = None) -> list[bytes]:
        """Return the keys whose newest records are in one file, of chosen segments or of all;
        raises Unavailable."""
        segment = self.catalog.segments.get(sequence)
        if segment is None:
            return []
        rows = self._files.index_of(segment).rows
        newest = self.catalog.newest(table.hashes_in(rows["key"]), places_of(segment, rows))
        if chosen is not None:
            newest &= chosen(rows["segment"])
        return [row.tobytes() for row in rows["key"][newest]]

    # --- appending ---

    def append(self, blocks: Iterable[tuple[BlockHeader, memoryview]]) -> int:
        """Write blocks; they are found after `flush` at the latest. Returns how many fitted. Raises
        Unavailable when the disk fails: what was found before still is."""
        try:
            count = sum(self._add(header, payload, "appended") for header, payload in blocks)
            self._publish()
        except Exception as error:
            self._give_up(error)
            raise
        return count

    def flush(self) -> None:
        """Let everything that was appended be found; raises Unavailable."""
        self._end(self._appender.flush)

    def sync(self) -> None:
        """As `flush`, and all that is found lasts, what was found before a fault too; raises
        Unavailable when it does not."""
        self._end(self._appender.sync, lasting=True)

    def _end(self, write: Callable[[], None], *, lasting: bool = False) -> None:
        try:
            if self._current is not None:
                write()
                self._publish()
            self._background.settle()
            if lasting:
                self._secure()
        except Exception as error:
            self._give_up(error)
            raise

    def _secure(self) -> None:
        """Let what is neither sealed nor being written last, or be found no more."""
        for segment in self._files.all():
            if not segment.sealed and segment is not self._current:
                self._files.secure(segment)
        missing = self._files.forget_missing()
        if missing:
            raise Unavailable(f"flash: somebody has removed {missing} files, with their blocks")

    def close(self) -> None:
        """Sync, and let go of the files."""
        try:
            self.sync()
            self._background.close()
        except Unavailable as error:
            _log.error("%s: what was not synced may be lost", error)
        self._files.close()
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
        carried: list[tuple[BlockHeader, memoryview]] = []
        self._make_room(carried)  # a fault came between the last file and the room for this one
        self._see_folder()
        try:
            sequence, file = self._next_file()
        except DiskFull as error:
            if not self._files.lower(error, self._settings.segment_bytes):
                raise
            self._make_room(carried)
            sequence, file = self._next_file()
        file_id = self._random_bytes(records.ID_BYTES)
        segment = Segment(file, FileHead(file_id, sequence, self._settings.segment_bytes))
        self.catalog.segments[sequence] = segment
        self._current = segment
        self._appender.start(segment.file)
        self._appender.add(records.file_head(segment.head))
        for header, payload in carried:
            self._add(header, payload, "copied")
        if not self._has_room():
            self._clean(self._files.victim(segment))
        self._background.make(name_of(self._next))

    def _next_file(self) -> tuple[int, DiskFile]:
        # Whatever becomes of this file, its name is not tried again.
        sequence, self._next = self._next, self._next + 1
        return sequence, self._background.take(name_of(sequence))

    def _see_folder(self) -> None:
        """When somebody has removed the folder, what was in it is not found any more either."""
        if self._disk.renewals > self._renewals:
            self._renewals, before = self._disk.renewals, len(self.catalog)
            self._files.forget_missing()
            gone = before - len(self.catalog)
            _log.error("flash: %d blocks are gone with the folder that was removed", gone)

    def _has_room(self) -> bool:
        return self._files.have_room(self._settings.segment_bytes)

    def _give_up(self, error: Exception) -> None:
        """The file's end is in doubt: what is found stays, nothing more is appended to it."""
        self.catalog.fault("write", error)
        if isinstance(error, DiskFull) and self._current is not None:
            self._files.lower(error, self._settings.segment_bytes)
        self._current = None
        self._added.clear()
        self._appender.give_up()

    # --- giving files back ---

    def _make_room(self, carried: list[tuple[BlockHeader, memoryview]]) -> None:
        """Give files back while there is none that is being written; what of them is worth copying
        is added to what is carried already."""
        while not self._has_room():
            segment = self._files.victim(None)
            left = self._copy_bytes - sum(len(payload) + PAGE for _, payload in carried)
            with contextlib.suppress(Unavailable):  # without an index, it only goes
                if segment.hot_pages:
                    carried += self._files.hot_in(segment, left)
            self._clean(segment)

    @property
    def _copy_bytes(self) -> int:
        return int(self._settings.segment_bytes * COPY_SHARE)

    def _clean(self, segment: Segment) -> None:
        """Copy what is worth it forward, where there is a file for it, then give the file back."""
        is_replaced = self._files.is_replaced(segment)
        if self._current is not None and segment.hot_pages:
            self._copy_forward(segment)
            self._appender.sync()
            self._publish()
        if is_replaced:
            self._let_all_last()
        self._files.free(segment)

    def _let_all_last(self) -> None:
        """What is found instead of older records must last before these go."""
        self._background.settle()
        if self._current is not None:
            self._appender.sync()
            self._publish()
        for each in self._files.all():
            if not each.sealed and each is not self._current:
                each.file.sync()

    def _copy_forward(self, segment: Segment) -> None:
        # What was carried is in this file already: together they fit.
        left = self._copy_bytes - (self._appender.position - PAGE)
        for header, payload in self._files.hot_in(segment, left):
            self._add(header, payload, "copied")

    # --- erasing ---

    def drop(self, order: DropOrder) -> int:
        """Erase blocks, for good, when this returns; returns how many were found. Raises
        Unavailable when not all of it could be done."""
        try:
            count = sum(self._drop(part) for part in order.parts())
        except Exception as error:
            self._give_up(error)
            raise
        if self._files.unopened:
            raise Unavailable(
                f"flash: {self._files.unopened} files that could not be opened were not erased: "
                "raise the limit of open files, start the node again, and drop again"
            )
        return count

    def _drop(self, order: DropOrder) -> int:
        try:
            segment, page = self._note(order)
        except Unavailable as error:  # a full disk takes no note; to overwrite needs no room
            self._give_up(error)
            return sum(self._erase(each, order) for each in self._files.all())
        return self._finish_drop(order, segment, page)

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
        for segment in self._files.all():
            if segment.sequence <= noted_in.sequence:
                before = page if segment is noted_in else table.PAGE_MAX
                count += self._erase(segment, order, before)
        if noted_in.sequence in self.catalog.segments:
            self._overwrite(noted_in, page, records.record_pages(order))
            noted_in.file.sync()
        self.catalog.counts["dropped"] += count
        return count

    def _erase(self, segment: Segment, order: DropOrder, before: int = table.PAGE_MAX) -> int:
        index = self._files.index_of(segment)
        chosen = order.matches(index.rows, index.origins) & (index.rows["page"] < before)
        if not chosen.any():
            return 0
        rows = index.rows[chosen]
        there = self.catalog.remove(table.hashes_in(rows["key"]), places_of(segment, rows))
        # The file with the note must stay until the rest is done.
        if chosen.all() and segment.sealed:
            self._files.free(segment)
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
