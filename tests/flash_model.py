"""Small blocks and a tiny log on a disk in memory, for the tests of the flash tier; what it must
serve, what it may; and threads that are late."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from inline import InlineFutures
from kvass.common.block import BlockHeader
from kvass.common.checksum import sums
from kvass.kvstore.flash.disk import PAGE, Disk, page_memory
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.settings import LogSettings
from kvass.kvstore.flash.table import pages_in
from memory_disk import MemoryDisk

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


class Late(Future[Any]):
    """Done at the latest when somebody asks for it."""

    def __init__(self, threads: LateFutures) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            self._threads.run_one()
        return super().result()


class LateFutures(Executor):
    """Threads that come to their work in any order, as late as they may: what one has not begun
    when the process dies is not done. Mutable field: `_waiting`."""

    def __init__(self, chance: random.Random, eager: float = 0.3) -> None:
        self._chance = chance
        self._eager = eager
        self._waiting: list[tuple[Late, Callable[[], object]]] = []

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Late:
        future = Late(self)
        self._waiting.append((future, partial(function, *args, **named)))
        while self._waiting and self._chance.random() < self._eager:
            self.run_one()
        return future

    def run_one(self) -> None:
        at = self._chance.randrange(len(self._waiting))
        future, work = self._waiting.pop(at)
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


def open_log(
    disk: Disk, settings: LogSettings = SMALL, seed: int = 0, *, late: bool = False
) -> FlashLog:
    chance = random.Random(seed)
    threads = LateFutures(chance) if late else InlineFutures()
    return FlashLog(disk, settings, threads, random.Random(seed).randbytes)


def read(log: FlashLog, number: int) -> bytes | None:
    """Read a block as a node does: find, read, check; None for a miss."""
    key = key_of(number)
    (place,) = log.catalog.find([key])
    if not place:
        return None
    fetched = log.catalog.read(key, place, page_memory(pages_in(place) * PAGE))
    if fetched is None:
        return None
    if not fetched.is_right():
        log.catalog.found_wrong(key, place)
        return None
    assert fetched.header == header_of(number)
    return bytes(fetched.payload)


def matches(order: DropOrder, number: int) -> bool:
    header = header_of(number)
    return (
        order.namespace in (None, header.namespace)
        and order.tenant in (None, header.tenant)
        and order.writer in (None, header.writer)
        and (order.keys is None or header.key in order.keys)
    )


@dataclass
class Model:
    """`sure` must be served, `possible` may be, nothing else; of these, `doomed` by a drop that was
    not finished: the next start does that."""

    sure: set[int] = field(default_factory=set)
    log: FlashLog | None = None
    possible: set[int] = field(default_factory=set)
    doomed: set[int] = field(default_factory=set)

    def see(self, what: str, name: str) -> None:
        """What is given back to make room is nobody's loss, from the moment when it goes."""
        if what == "remove" and self.log is not None:
            self.sure &= self.here(self.log)

    def step(self, log: FlashLog, what: str, value: object) -> None:
        if what == "put":
            assert isinstance(value, list)
            self.possible.update(value)
            assert log.append(block_of(number) for number in value) == len(value)
            log.flush()
            # Where a disk lets it have three files, six blocks may be more than two of them hold.
            is_least = log.total_bytes <= 3 * SMALL.segment_bytes
            for number in value[-2:] if is_least else value:
                assert read(log, number) == payload_of(number), "what was appended is found"
            self.doomed.difference_update(value)
        elif what == "sync":
            log.sync()
            self.sure = self.here(log) - self.doomed
        elif what == "use":
            assert isinstance(value, int)
            log.catalog.use([key_of(value)])
        else:
            assert isinstance(value, DropOrder)
            hit = {number for number in self.possible if matches(value, number)}
            self.sure -= hit
            self.doomed |= hit
            log.drop(value)
            self.possible -= hit
            self.doomed -= hit
            assert not hit & self.here(log)

    def here(self, log: FlashLog) -> set[int]:
        return {number for number in range(31) if log.catalog.find([key_of(number)])[0]}

    def check(self, log: FlashLog) -> None:
        for number in range(31):
            found = read(log, number)
            assert found in (None, payload_of(number)), "wrong bytes"
            assert found is None or number in self.possible, "what was erased came back"
            assert found is not None or number not in self.sure, "what was synced is lost"
        used = sum(each.head.size for each in log.catalog.segments.values())
        assert used <= SMALL.flash_bytes
        live = sum(each.live_pages for each in log.catalog.segments.values())
        assert live == sum(p & 0xFFFF for p in log.catalog.find([key_of(n) for n in range(31)]))


def check_erased(disk: MemoryDisk, possible: set[int]) -> None:
    """No byte of what may not be there is there, in any file."""
    for content in disk.files.values():
        for number in set(range(31)) - possible:
            assert payload_of(number)[16:48] not in content.data, f"{number} was not overwritten"
            assert key_of(number) not in content.data, f"the name of {number} is still there"
