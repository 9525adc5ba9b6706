"""Small blocks and a tiny log on a disk in memory, for the tests of the flash tier."""

from __future__ import annotations

import hashlib
import random
from functools import cache

from kvass.common.block import BlockHeader
from kvass.kvstore.checksum import sums
from kvass.kvstore.flash.appender import InlineFutures
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory
from kvass.kvstore.flash.log import FlashLog, LogSettings
from kvass.kvstore.flash.table import pages_in

SMALL = LogSettings(
    flash_bytes=5 * 16 * PAGE,
    segment_bytes=16 * PAGE,
    unsynced_bytes=4 * PAGE,
    buffer_bytes=2 * PAGE,
)
WRITERS = ("w-ann", "w-bob")
TENANTS = ("t-red", "t-blue", "t-green")
SIZES = (200, 3600, 4096, 9000)
GROUPS = 2


@cache
def key_of(number: int) -> bytes:
    return hashlib.blake2b(f"key {number}".encode(), digest_size=32).digest()


@cache
def payload_of(number: int) -> bytes:
    """Return bytes that no other block has, at any place."""
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


@cache
def header_of(number: int) -> BlockHeader:
    payload = payload_of(number)
    return BlockHeader(
        key=key_of(number),
        parent=hashlib.blake2b(f"parent {number}".encode(), digest_size=32).digest(),
        segment_key=b"s" * 32,
        index=number,
        namespace=bytes([number % 2]) * 32,
        tenant=TENANTS[number % 3],
        writer=WRITERS[number // 2 % 2],
        token_count=4,
        length=len(payload),
        checksums=sums(memoryview(payload), 0, len(payload) // GROUPS, GROUPS),
    )


def block_of(number: int) -> tuple[BlockHeader, memoryview]:
    return header_of(number), memoryview(payload_of(number))


def open_log(disk: Disk, settings: LogSettings = SMALL, seed: int = 0) -> FlashLog:
    return FlashLog(disk, settings, InlineFutures(), random.Random(seed).randbytes)


def read(log: FlashLog, number: int) -> bytes | None:
    """Read a block as a node does: find, read, copy, check; None for a miss."""
    key = key_of(number)
    (place,) = log.catalog.find([key])
    if not place:
        return None
    fetched = log.catalog.read(key, place, page_memory(pages_in(place) * PAGE))
    if fetched is None:
        return None
    target = bytearray(fetched.header.length)
    if not fetched.copy_to(memoryview(target)):
        log.catalog.found_wrong(key, place)
        return None
    assert fetched.header == header_of(number)
    return bytes(target)
