"""What a node writes down beside its log: one text, replaced whole.

    note-1 ── written, synced ──> note-2, then note-1 is removed

A restart takes the newest that is whole: a death in between leaves the one before. It refuses to
know what the text says.
"""

from __future__ import annotations

import contextlib
import logging
import re
import struct

import xxhash

from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory

_log = logging.getLogger(__name__)

_NAME = re.compile("note-[0-9a-f]{16}")
MAGIC = b"KVASSNOT"
VERSION = 1
TEXT_MAX = 8 << 20  # more was not written by this program
_HEAD = struct.Struct("<8sHxxxxxxQQ")  # magic, version, length, checksum of the text


class Notes:
    """Mutable fields: `_names` of the notes that are there, `_next`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._names = sorted(name for name in disk.names() if _NAME.fullmatch(name))
        self._next = int(self._names[-1].partition("-")[2], 16) + 1 if self._names else 1

    def read(self) -> bytes | None:
        """Return the newest text that is whole; None when there is none."""
        for name in reversed(self._names):
            try:
                text = self._read(name)
            except Unavailable as error:
                _log.error("%s", error)
                continue
            if text is not None:
                return text
            _log.warning("flash: %s is damaged, or was not finished", name)
        return None

    def write(self, text: bytes) -> None:
        """Let this be the text; it lasts when this returns. Raises Unavailable."""
        name, self._next = f"note-{self._next:016x}", self._next + 1
        data = _HEAD.pack(MAGIC, VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text
        pages = page_memory(-(-len(data) // PAGE) * PAGE)
        pages[: len(data)] = data
        file = self._disk.create(name, len(pages))
        try:
            file.write(0, pages)
            file.sync()
        except Unavailable:
            with contextlib.suppress(Unavailable):
                self._disk.remove(name)
            raise
        finally:
            file.close()
        older, self._names = self._names, [name]
        for each in older:
            self._disk.remove(each)

    def _read(self, name: str) -> bytes | None:
        file = self._disk.open(name)
        try:
            head = page_memory(PAGE)
            if file.read(0, head) < PAGE:
                return None
            magic, version, length, checksum = _HEAD.unpack_from(head)
            if (magic, version) != (MAGIC, VERSION) or length > TEXT_MAX:
                return None
            data = page_memory(-(-(_HEAD.size + length) // PAGE) * PAGE)
            if file.read(0, data) < len(data):
                return None
            text = bytes(data[_HEAD.size : _HEAD.size + length])
        finally:
            file.close()
        return text if xxhash.xxh3_64_intdigest(text) == checksum else None
