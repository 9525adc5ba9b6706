"""The files of one log: how much room they take, which goes first, what of it is worth keeping, and
giving one back.

A file is given back in this order: no reader finds its records, it is gone from the disk, it is
closed. Where the disk is full before the limit is reached, the files that are there are the limit.
It refuses to know what is written, and when.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.kvstore.flash import recovery, table
from kvass.kvstore.flash.background import Background
from kvass.kvstore.flash.catalog import Catalog, places_of
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory
from kvass.kvstore.flash.records import FileIndex
from kvass.kvstore.flash.segment import Segment, name_of

_log = logging.getLogger(__name__)

RAISE_S = 600.0  # a try costs nothing but what it finds
SEGMENTS_MIN = 3  # one being written, one to be given back, and the one that is spare in between


class Files:
    """Mutable fields: `limit_bytes` and `files_max` (what they may take together), `_asked_bytes`
    and `_lowered_s` (the limit that was set, and when a full disk last set a lower one), `unopened`
    (how many files are on the disk that could not be opened). The segments are the catalog's."""

    def __init__(
        self, disk: Disk, catalog: Catalog, background: Background, limit_bytes: int, files_max: int
    ) -> None:
        self.limit_bytes = limit_bytes
        self.files_max = files_max
        self.unopened = 0
        self._asked_bytes = limit_bytes
        self._lowered_s: float | None = None
        self._disk = disk
        self._catalog = catalog
        self._background = background

    def recover(self, file_bytes: int) -> list[recovery.Found]:
        """Open what is there, oldest first; raises Unavailable. What cannot be opened keeps its
        room, as far as the log can go on in the rest."""
        wanted = self.limit_bytes // file_bytes
        if self.files_max < SEGMENTS_MIN:
            raise Unavailable(
                f"flash: {self.files_max} files may be open at once; expected {SEGMENTS_MIN} or "
                "more: raise the limit of open files"
            )
        if wanted > self.files_max:
            _log.warning(
                "flash: %d files of %d bytes are wanted, and %d may be open at once, half of all "
                "that this process may open: it keeps %d bytes; raise the limit of open files or "
                "store.flash_segment_bytes",
                wanted, file_bytes, self.files_max, self.files_max * file_bytes,
            )  # fmt: skip
        # Two more come before the first one is given back.
        found, unopened = recovery.recover(self._disk, self.files_max - SEGMENTS_MIN + 1)
        self.unopened = len(unopened)
        if unopened:
            _log.error(
                "flash: %d of %d files are not opened, since %d may be open at once: their blocks "
                "are not served, and no drop erases them; raise the limit of open files",
                len(unopened), len(unopened) + len(found), self.files_max,
            )  # fmt: skip
        left = self.limit_bytes - len(unopened) * file_bytes
        most = min(left, self.files_max * file_bytes)
        self.limit_bytes = self._asked_bytes = max(most, SEGMENTS_MIN * file_bytes)
        for each in found:
            self._catalog.segments[each.segment.sequence] = each.segment
        return found

    def all(self) -> list[Segment]:
        return list(self._catalog.segments.values())

    def used_bytes(self) -> int:
        return sum(each.head.size for each in self.all())

    def have_room(self, size: int) -> bool:
        """Say whether there is room for one more file. Of a disk that was full it is found out anew
        now and then: another's files may have filled it."""
        if self._lowered_s is not None and time.monotonic() - self._lowered_s >= RAISE_S:
            self.limit_bytes, self._lowered_s = self._asked_bytes, time.monotonic()
        count = len(self._catalog.segments)
        return count < self.files_max and self.used_bytes() + size <= self.limit_bytes

    def lower(self, why: Exception, file_bytes: int) -> bool:
        """The disk is full: what it has taken is the limit for a while. Returns False where that is
        too little for the log to go on in."""
        used = self.used_bytes()
        if used < SEGMENTS_MIN * file_bytes:
            return False
        if used < self.limit_bytes:
            _log.log(
                logging.WARNING if self._lowered_s is None else logging.INFO,
                "%s: the disk is full before the %d bytes of store.flash_bytes. Flash keeps the %d "
                "bytes that it has there, gives its oldest file back for each new one, and tries "
                "for more every %.0f minutes: make room, or lower store.flash_bytes",
                why, self._asked_bytes, used, RAISE_S / 60,
            )  # fmt: skip
            self.limit_bytes, self._lowered_s = used, time.monotonic()
        return True

    def victim(self, current: Segment | None) -> Segment:
        """Return the oldest file, or one that holds nothing any more."""
        files = (each for each in self.all() if each is not current)
        return min(files, key=lambda each: (each.live_pages > 0, each.sequence))

    def is_replaced(self, segment: Segment) -> bool:
        """Say whether newer records may be found instead of some of its."""
        try:
            rows = self.index_of(segment).rows
        except Unavailable:
            return True
        newest = self._catalog.newest(table.hashes_in(rows["key"]), places_of(segment, rows))
        return not bool(newest.all())

    def hot_in(self, segment: Segment, bytes_max: int) -> Iterator[tuple[BlockHeader, memoryview]]:
        """Read what was used since it was written, as much as may be copied forward; raises
        Unavailable when the file's index cannot be read."""
        rows = self.index_of(segment).rows
        places = places_of(segment, rows)
        hot = self._catalog.hot(table.hashes_in(rows["key"]), places)
        for row, place in zip(rows[hot], places[hot].tolist(), strict=True):
            size = table.pages_in(place) * PAGE
            bytes_max -= size
            if bytes_max < 0:
                break
            key = row["key"].tobytes()
            fetched = self._catalog.read(key, place, page_memory(size))
            if fetched is None:
                continue
            if fetched.is_right():
                yield fetched.header, fetched.payload
            else:
                self._catalog.found_wrong(key, place)

    def free(self, segment: Segment) -> None:
        """Give one back; raises Unavailable."""
        try:
            rows = self.index_of(segment).rows
        except Unavailable:
            self._catalog.remove_file(segment.sequence)
        else:
            self._catalog.remove(table.hashes_in(rows["key"]), places_of(segment, rows))
        # Until it is gone from the disk it must be known: a drop has to reach it.
        self._disk.remove(name_of(segment.sequence))
        self._forget(segment)
        self._catalog.counts["freed_files"] += 1

    def index_of(self, segment: Segment) -> FileIndex:
        """Return a file's records, also when its index is damaged; raises Unavailable."""
        self._background.settle(segment)
        try:
            return segment.index()
        except Unavailable as error:
            _log.error("%s; it is made anew from what is in the file", error)
        found = recovery.read_through(segment)
        segment.seal()
        return found.index

    def secure(self, segment: Segment) -> None:
        """Make what is found of a file that was given up last, or be found no more; raises
        Unavailable. What it holds is read again: after a sync that failed nothing else is sure."""
        rows = segment.index().rows
        found = recovery.read_through(segment)
        gone = ~np.isin(rows["page"], found.index.rows["page"])
        hashes, places = table.hashes_in(rows["key"]), places_of(segment, rows)
        self._catalog.remove(hashes[gone], places[gone])
        # An erasure that is not finished is told by the record of it, which an index names not.
        if not found.drops:
            segment.seal()

    def forget_missing(self) -> int:
        """Forget files that somebody has removed from the folder; returns how many. Raises
        Unavailable."""
        with contextlib.suppress(Unavailable):
            self._background.settle()  # a file is closed only when nobody writes to it
        there = set(self._disk.names())
        missing = [each for each in self.all() if name_of(each.sequence) not in there]
        for segment in missing:
            self._catalog.remove_file(segment.sequence)
            self._forget(segment)
        return len(missing)

    def close(self) -> None:
        """Let go of all files."""
        for segment in self.all():
            self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        del self._catalog.segments[segment.sequence]
        segment.close()
