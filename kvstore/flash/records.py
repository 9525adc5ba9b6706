"""What the bytes of a segment file mean. Pure.

    page 0        file head: magic, version, random id, sequence, size, checksum
    then          records, each from a page's start on: head ‖ body ‖ payload ‖ zeros to a page
    at the end    of a sealed file its index: rows ‖ origins ‖ zeros ‖ tail, checksum in the tail

A record's head names its file's id and its own offset: bytes of another file, place or payload are
no record. Its body is a block's header, whose checksums (one a head group) are of the payload; or
what a drop erases. It refuses to know where files are and which record is the newest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvass.common.block import BlockHeader
from kvass.common.errors import Invalid, Unavailable
from kvass.common.keys import KEY_BYTES
from kvass.kvstore.flash.disk import PAGE

FILE_MAGIC = b"KVASSLOG"
RECORD_MAGIC = b"KVASSREC"
INDEX_MAGIC = b"KVASSIDX"
VERSION = 1
INDEX_VERSION = 2  # a file whose index has another one is read through, and gets a new one
ID_BYTES = 16
PAYLOAD_ALIGN = 64  # as in a slot, so that a copy runs from cache line to cache line
DROP_KEYS_MAX = 4096  # of one record of a drop: 128 KiB
BODY_BYTES_MAX = 1 << 24  # a head is believed only so far before its checksum was seen

# The last field of each is the checksum of all that comes before it, and of the body.
_FILE = struct.Struct("<8sHxxxxxx16sQQQ")
_RECORD = struct.Struct("<8sHBBIQ16sQQ")
_TAIL = struct.Struct("<8sHxxxxxx16sIIQQ")
KIND_BLOCK, KIND_DROP = 1, 2
CODEC_PLAIN = 0  # the only one: zstd takes longer than the bytes it saves on a local disk

# Of the parent's and the segment's key the first bytes, as `table.py` has them: to find what was
# computed upon a block, and where it belongs, without a look at its record.
ROW = np.dtype(
    [
        ("key", np.uint8, (KEY_BYTES,)),
        ("parent", "<u8"),
        ("segment", "<u8"),
        ("page", "<u4"),
        ("pages", "<u4"),
        ("origin", "<u4"),
        ("index", "<u4"),
    ]
)
Rows = NDArray[np.void]


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """By what blocks are dropped, besides their keys; few differ in one file."""

    namespace: bytes
    tenant: str
    writer: str


class DropOrder(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What to erase: blocks that match every criterion that is given."""

    namespace: bytes | None = None
    tenant: str | None = None
    writer: str | None = None
    keys: tuple[bytes, ...] | None = None

    def parts(self) -> list[DropOrder]:
        """Cut a drop by keys into records of bounded size."""
        if self.keys is None:
            return [self]
        starts = range(0, len(self.keys), DROP_KEYS_MAX)
        return [
            msgspec.structs.replace(self, keys=self.keys[at : at + DROP_KEYS_MAX]) for at in starts
        ]

    def matches(self, rows: Rows, origins: Sequence[Origin]) -> NDArray[np.bool_]:
        """Say which rows of a file it erases."""
        of_origin = [
            (self.namespace in (None, origin.namespace))
            and (self.tenant in (None, origin.tenant))
            and (self.writer in (None, origin.writer))
            for origin in origins
        ]
        chosen: NDArray[np.bool_] = np.array([*of_origin, False], dtype=bool)[rows["origin"]]
        if self.keys is not None:
            named = np.frombuffer(b"".join(self.keys), dtype=f"V{KEY_BYTES}")
            chosen &= np.isin(as_names(rows), named)
        return chosen


@dataclass(frozen=True, slots=True)
class FileHead:
    """`file_id` is random: nothing else ever written holds it by chance."""

    file_id: bytes
    sequence: int
    size: int


@dataclass(frozen=True, slots=True)
class Record:
    """One found record: a block's header, or what was to be dropped. `payload_at` is from its
    start on."""

    content: BlockHeader | DropOrder
    payload_at: int
    pages: int


@dataclass(frozen=True, slots=True)
class FileIndex:
    """What a sealed file says of its records."""

    rows: Rows
    origins: list[Origin]

    def without(self, erased: NDArray[np.bool_]) -> FileIndex:
        """Return the rest, with nothing in it that only the erased rows had."""
        rows = self.rows[~erased]
        numbers, rows["origin"] = np.unique(rows["origin"], return_inverse=True)
        return FileIndex(rows, [self.origins[number] for number in numbers])


def as_names(rows: Rows) -> NDArray[np.void]:
    """Return the rows' keys, each as one value."""
    return np.ascontiguousarray(rows["key"]).view(f"V{KEY_BYTES}").reshape(-1)


def pages_of(size: int) -> int:
    """Return how many pages so many bytes take."""
    return -(-size // PAGE)


def _sum(*parts: bytes | memoryview) -> int:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return int(state.intdigest())


def file_head(head: FileHead) -> bytes:
    """Return a file's first page."""
    fields = (FILE_MAGIC, VERSION, head.file_id, head.sequence, head.size)
    checksum = _sum(_FILE.pack(*fields, 0)[:-8])
    return _FILE.pack(*fields, checksum).ljust(PAGE, b"\0")


def read_file_head(page: memoryview) -> FileHead | None:
    """Return what a file's first page says; None when it is none (a file whose making was cut
    off). Raises Unavailable for one of another version."""
    magic, version, file_id, sequence, size, checksum = _FILE.unpack_from(page)
    if magic != FILE_MAGIC or checksum != _sum(page[: _FILE.size - 8]):
        return None
    if version != VERSION:
        raise Unavailable(
            f"flash: a file has format version {version}; this program knows {VERSION}"
        )
    return FileHead(file_id, sequence, size)


def record_head(content: BlockHeader | DropOrder, file_id: bytes, offset: int) -> bytes:
    """Return what comes before a record's payload, whole cache lines of it."""
    body = msgspec.msgpack.encode(content)
    kind, payload = KIND_DROP, 0
    if isinstance(content, BlockHeader):
        kind, payload = KIND_BLOCK, content.length
    fields = (RECORD_MAGIC, VERSION, kind, CODEC_PLAIN, len(body), payload, file_id, offset)
    checksum = _sum(_RECORD.pack(*fields, 0)[:-8], body)
    head = _RECORD.pack(*fields, checksum) + body
    return head.ljust(-(-len(head) // PAYLOAD_ALIGN) * PAYLOAD_ALIGN, b"\0")


def record_pages(content: BlockHeader | DropOrder) -> int:
    """Return how many pages a record takes."""
    length = content.length if isinstance(content, BlockHeader) else 0
    return pages_of(len(record_head(content, bytes(ID_BYTES), 0)) + length)


def head_room(page: memoryview) -> int:
    """Return how many bytes the head that begins here takes, if there is one; else 0."""
    magic, version, _, codec, body_size, *_ = _RECORD.unpack_from(page)
    if magic != RECORD_MAGIC or version != VERSION or codec != CODEC_PLAIN:
        return 0
    return _RECORD.size + body_size if body_size <= BODY_BYTES_MAX else 0


def read_record(data: memoryview, file_id: bytes, offset: int) -> Record | None:
    """Return the record whose head `data` begins with, at `offset` of its file; None when there is
    no whole head of one. Of the payload it looks at nothing."""
    if len(data) < _RECORD.size:
        return None
    room = head_room(data)
    if not room or len(data) < room:
        return None
    _, _, kind, _, _, payload, found_id, found_at, checksum = _RECORD.unpack_from(data)
    body = data[_RECORD.size : room]
    if (found_id, found_at) != (file_id, offset):
        return None
    if checksum != _sum(data[: _RECORD.size - 8], body):
        return None
    payload_at = -(-room // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
    pages = pages_of(payload_at + payload)
    if kind == KIND_DROP:
        return Record(msgspec.msgpack.decode(body, type=DropOrder), payload_at, pages)
    header = msgspec.msgpack.decode(body, type=BlockHeader)
    try:
        header.check()
    except Invalid:
        return None  # of another version of the layout: nobody asks for its key
    return Record(header, payload_at, pages)


def index_size(rows: int, origins_size: int) -> int:
    """Return the bytes that a file's index takes, whole pages."""
    # An array's length takes up to five bytes.
    return pages_of(rows * ROW.itemsize + 5 + origins_size + _TAIL.size) * PAGE


def file_index(index: FileIndex, file_id: bytes) -> bytes:
    """Return what a sealed file ends in."""
    rows, origins = index.rows.tobytes(), msgspec.msgpack.encode(index.origins)
    size = pages_of(len(rows) + len(origins) + _TAIL.size) * PAGE
    padding = bytes(size - len(rows) - len(origins) - _TAIL.size)
    fields = (INDEX_MAGIC, INDEX_VERSION, file_id, len(index.rows), len(origins), size)
    checksum = _sum(rows, origins, _TAIL.pack(*fields, 0)[:-8])
    return rows + origins + padding + _TAIL.pack(*fields, checksum)


def index_room(end: memoryview, file_id: bytes) -> int:
    """Return the size of the index whose last bytes are `end`; 0 when there is none."""
    magic, version, found_id, rows, origins, size, _ = _TAIL.unpack_from(end, len(end) - _TAIL.size)
    fits = size >= rows * ROW.itemsize + origins + _TAIL.size and size % PAGE == 0
    is_ours = (magic, version, found_id) == (INDEX_MAGIC, INDEX_VERSION, file_id)
    return size if is_ours and fits else 0


def read_index(data: memoryview, file_id: bytes) -> FileIndex | None:
    """Return the index that `data` is; None when it is not whole."""
    if index_room(data, file_id) != len(data):
        return None
    tail = data[len(data) - _TAIL.size :]
    _, _, _, count, origins_size, _, checksum = _TAIL.unpack_from(tail)
    rows_end = count * ROW.itemsize
    origins = data[rows_end : rows_end + origins_size]
    if checksum != _sum(data[:rows_end], origins, tail[:-8]):
        return None
    rows = np.frombuffer(data[:rows_end], dtype=ROW).copy()
    return FileIndex(rows, msgspec.msgpack.decode(origins, type=list[Origin]))
