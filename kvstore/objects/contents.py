"""What an object's bytes mean: one record for each block, as on flash, at equal distances. Pure.

    record 0 ‖ zeros │ record 1 ‖ zeros │ …

The distance (stride) is the object's size divided by its number of blocks, which its name says: so
every block can be read by one range, and nothing about an object need be read before. A record's
head names the object and its own place (`flash/records.py`): bytes of another object, of another
place or of an older format are no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from kvass.common.block import BlockHeader
from kvass.kvstore.flash import records
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.fetched import Fetched
from kvass.kvstore.flash.table import PAGES_MAX
from kvass.kvstore.objects.names import BLOCKS_MAX

OBJECT_BYTES = 16 << 20  # at most, of more than one block: four under way take 64 MiB of memory


def object_id(name: str) -> bytes:
    """Return what the records of an object call it."""
    return blake2b(name.encode(), digest_size=records.ID_BYTES, person=b"kvass-object").digest()


def packed(name: str, headers: Sequence[BlockHeader], payloads: Sequence[memoryview]) -> memoryview:
    """Return an object of these blocks."""
    stride = stride_of(headers)
    data = memoryview(bytearray(stride * len(headers)))
    for number, (header, payload) in enumerate(zip(headers, payloads, strict=True)):
        at = number * stride
        head = records.record_head(header, object_id(name), at)
        data[at : at + len(head)] = head
        data[at + len(head) : at + len(head) + header.length] = payload
    return data


def read(name: str, data: memoryview, at: int) -> Fetched | None:
    """Return the block whose record was read at offset `at`; None when there is no whole one."""
    record = records.read_record(data, object_id(name), at)
    if record is None or not isinstance(record.content, BlockHeader):
        return None
    end = record.payload_at + record.content.length
    if end > len(data):
        return None
    return Fetched(record.content, data[record.payload_at : end])


def stride_of(headers: Sequence[BlockHeader]) -> int:
    """Return the bytes that each block of an object takes."""
    return max(map(records.record_pages, headers)) * PAGE


def stride_in(size_bytes: int, blocks: int) -> int:
    """Return the stride of an object of this size; 0 when there is none of it."""
    stride, rest = divmod(size_bytes, blocks)
    return stride if not rest and not stride % PAGE and 0 < stride // PAGE <= PAGES_MAX else 0


def runs_of(headers: Sequence[BlockHeader]) -> list[list[BlockHeader]]:
    """Cut blocks of one segment into objects: children follow their parents, where they are there,
    so that what is asked for together lies together."""
    runs: dict[bytes, list[BlockHeader]] = {}  # by the key of their last block
    done: list[list[BlockHeader]] = []
    for header in sorted(headers, key=lambda header: (header.index, header.key)):
        run = runs.pop(header.parent, [])
        if run and (
            len(run) == BLOCKS_MAX or stride_of([*run, header]) * (len(run) + 1) > OBJECT_BYTES
        ):
            done.append(run)
            run = []
        runs[header.key] = [*run, header]
    return done + list(runs.values())
