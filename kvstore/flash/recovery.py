"""What a restart finds in the folder: of sealed files their indexes, of others what is whole.

A file whose index is missing or damaged is read through, payloads and all: what is whole is kept,
and every other byte that is not zero is overwritten, so that nothing is left that no index names.
What cannot be opened is kept, and what is not the log's is left alone.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

import numpy as np

from kvass.common.block import BlockHeader
from kvass.common.checksum import sums
from kvass.kvstore.flash import records
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory
from kvass.kvstore.flash.records import DropOrder, FileIndex, Record
from kvass.kvstore.flash.segment import Segment, name_of

_log = logging.getLogger(__name__)

OWN_NAME = re.compile("segment-[0-9a-f]{16}")


@dataclass(slots=True)
class Found:
    """A file with its records. `drops`: erasures in it that were not finished, by page."""

    segment: Segment
    index: FileIndex
    drops: dict[int, DropOrder] = field(default_factory=dict)


def recover(disk: Disk, files_max: int) -> tuple[list[Found], list[str]]:
    """Return every file that holds something, oldest first, and the names of the oldest ones
    beyond `files_max`, which are not opened. What was read and holds nothing is removed; one that
    was not sealed is not sealed now either.

    Raises Unavailable when the folder or one of its files cannot be read, and removes nothing then:
    rights that are missing, descriptors that have run out and a bad sector are all mended, or the
    file removed, by somebody who knows.
    """
    found: list[Found] = []
    empty: list[str] = []
    names = sorted((name for name in disk.names() if _is_own(name)), reverse=True)
    try:
        for name in names[:files_max]:
            each = _open(disk, name)
            if each is None:
                empty.append(name)
            else:
                found.append(each)
        for name in empty:
            disk.remove(name)
    except BaseException:
        for each in found:
            each.segment.close()
        raise
    found.reverse()
    return found, names[files_max:]


def _is_own(name: str) -> bool:
    if OWN_NAME.fullmatch(name):
        return True
    if name.startswith("segment-"):
        _log.warning("flash: %s is no file of the log: it is left alone", name)
    return False


def _open(disk: Disk, name: str) -> Found | None:
    """Open one file; None when it holds nothing. Raises Unavailable."""
    file = disk.open(name)
    try:
        page = page_memory(PAGE)
        head = records.read_file_head(page) if file.read(0, page) == PAGE else None
        if head is None or name_of(head.sequence) != name:
            file.close()
            return None
        segment = Segment(file, head)
        index = segment.read_index()
        segment.sealed = index is not None
        found = Found(segment, index) if index is not None else read_through(segment)
    except BaseException:
        file.close()
        raise
    if not len(found.index.rows) and not found.drops:
        segment.close()
        return None
    return found


def read_through(segment: Segment) -> Found:
    """Find the records that are whole, and overwrite what is not; they become the file's rows."""
    size, file_id = segment.head.size, segment.head.file_id
    data = page_memory(size)
    data = data[: segment.file.read(0, data)]
    segment.sealed = False
    segment.forget()
    drops: dict[int, DropOrder] = {}
    junk: list[int] = []
    at = PAGE
    while at + PAGE <= len(data):
        record = _whole(data, file_id, at)
        if record is None:
            if np.frombuffer(data[at : at + PAGE], dtype=np.uint64).any():
                junk.append(at)
            at += PAGE
            continue
        if isinstance(record.content, BlockHeader):
            end = at + record.pages * PAGE
            if not segment.room_after(end, record.content):
                # An index of an earlier version was smaller than the one that is to come here.
                junk += range(at, len(data) // PAGE * PAGE, PAGE)
                break
            segment.add(record.content, at // PAGE, record.pages)
        else:
            drops[at // PAGE] = record.content
        at += record.pages * PAGE
    zeros = page_memory(PAGE)
    for at in junk:
        segment.file.write(at, zeros)
    segment.file.sync()
    return Found(segment, segment.index(), drops)


def _whole(data: memoryview, file_id: bytes, at: int) -> Record | None:
    """Return the record at an offset, if it is there to its last byte."""
    record = records.read_record(data[at:], file_id, at)
    if record is None or at + record.pages * PAGE > len(data):
        return None
    header = record.content
    if isinstance(header, BlockHeader):
        groups = len(header.checksums)
        start = at + record.payload_at
        if sums(data, start, header.length // groups, groups) != header.checksums:
            return None
    return record
