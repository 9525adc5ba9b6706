"""The flash log on a bad disk: what a sync has said to last lasts, whatever failed before and after
it; what it could not say is an error, and the log goes on.

Threads are late here, so that a file is sealed long after the next one was begun.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_model import (
    SMALL,
    TENANTS,
    WRITERS,
    LateFutures,
    Model,
    block_of,
    key_of,
    open_log,
    payload_of,
    read,
)
from kvass.common.block import BlockHeader
from kvass.common.errors import Unavailable
from kvass.kvstore.flash import records
from kvass.kvstore.flash.files import RAISE_S
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.segment import name_of
from memory_disk import Killed, MemoryDisk

# As on a node: much more than a file may be unsynced. Else hardly anything ever is, in a log so
# small.
LAZY = replace(SMALL, unsynced_bytes=1 << 20)
OPERATIONS = ("create", "write", "sync", "remove", "read")


def some_steps(chance: random.Random) -> list[tuple[str, object]]:
    steps: list[tuple[str, object]] = []
    for _ in range(chance.randrange(1, 40)):
        what = chance.choices(("put", "sync", "use", "drop"), (60, 15, 15, 10))[0]
        orders = (
            DropOrder(writer=chance.choice(WRITERS)),
            DropOrder(tenant=chance.choice(TENANTS)),
            DropOrder(keys=tuple(key_of(chance.randrange(31)) for _ in range(3))),
        )
        values: dict[str, object] = {
            "put": [chance.randrange(31) for _ in range(chance.randrange(1, 7))],
            "sync": None,
            "use": chance.randrange(31),
            "drop": chance.choice(orders),
        }
        steps.append((what, values[what]))
    return steps


class BadDisk:
    """A disk in memory, of which some operations fail for a while. Mutable fields: `failing`, and
    with which `chance_of` it."""

    def __init__(self, chance: random.Random, model: Model) -> None:
        self.disk = MemoryDisk()
        self.disk.refuses = self.refuses
        self.failing: tuple[str, ...] = ()
        self.chance_of = 0.0
        self._chance = chance
        self._model = model

    def refuses(self, what: str, name: str) -> str | None:
        self._model.see(what, name)
        fails = what in self.failing and self._chance.random() < self.chance_of
        return "Input/output error" if fails else None

    def turn(self, what: str) -> None:
        """Fail otherwise from here on, now and then."""
        if self._chance.random() < 0.2:
            self.chance_of = self._chance.choice((0.0, 0.1, 0.5, 1.0))
            self.failing = tuple(self._chance.sample(OPERATIONS, self._chance.randrange(1, 3)))
        if what == "put":  # the model reads what it has put
            self.failing = tuple(each for each in self.failing if each != "read")


@given(seed=st.integers(0, 1 << 30), faults=st.booleans(), files=st.sampled_from((None, 2, 3, 4)))
def test_what_was_said_to_last_lasts(seed: int, faults: bool, files: int | None) -> None:
    """`files`: how many the disk has room for."""
    chance, model = random.Random(seed), Model()
    bad = BadDisk(chance, model)
    bad.disk.room = files and files * SMALL.segment_bytes
    for _ in range(chance.randrange(1, 4)):
        bad.failing = ()
        bad.disk.budget = chance.choice((None, chance.randrange(400_000)))
        settings = chance.choice((SMALL, LAZY))
        try:
            model.log = None
            model.log = log = open_log(bad.disk, settings, seed=chance.randrange(99), late=True)
            model.check(log)
            for what, value in some_steps(chance):
                if faults:
                    bad.turn(what)
                with contextlib.suppress(Unavailable):
                    model.step(log, what, value)
        except Killed:
            pass
        if chance.random() < 0.7:
            bad.disk.crash(lambda size: chance.choice((0, size, chance.randrange(size + 1))))
        bad.disk.budget, bad.failing = None, ()
    model.log = None
    log = open_log(bad.disk, seed=seed)
    model.check(log)
    log.close()
    model.check(open_log(bad.disk, seed=seed + 1))


@pytest.mark.parametrize("what", ["write", "sync"])
def test_a_sync_after_a_fault_covers_the_file_that_was_given_up(what: str) -> None:
    disk = MemoryDisk()
    log = open_log(disk, LAZY)
    log.append([block_of(1)])
    log.flush()
    disk.refuses = lambda doing, name: "Input/output error" if doing == what else None
    with pytest.raises(Unavailable):
        log.append([block_of(2)])
        log.sync()
    assert read(log, 1) == payload_of(1)
    with pytest.raises(Unavailable):  # it is no better now, and says so each time
        log.append([block_of(3)])
        log.sync()
    disk.refuses = lambda doing, name: None
    log.sync()
    disk.crash(lambda size: 0)
    assert read(open_log(disk, seed=1), 1) == payload_of(1)


def test_a_sync_that_finds_a_torn_record_in_what_was_given_up_promises_it_not() -> None:
    disk = MemoryDisk()
    log = open_log(disk, LAZY)
    log.append([block_of(1), block_of(2)])
    log.flush()
    disk.refuses = lambda doing, name: "Input/output error" if doing == "sync" else None
    with pytest.raises(Unavailable):
        log.sync()
    disk.refuses = lambda doing, name: None
    content = disk.files[name_of(1)]
    at = content.data.index(payload_of(2)[:64])
    content.data[at : at + 64] = bytes(64)  # the disk kept something else than it was given
    log.sync()
    assert read(log, 1) == payload_of(1) and not log.catalog.find([key_of(2)])[0]
    assert log.catalog.counts["corrupt"] == 0, "nobody has to meet it first"


@pytest.mark.parametrize("place", range(110, 130))
def test_a_file_goes_only_when_what_replaced_its_records_lasts(place: int) -> None:
    """The file that was sealed last may not be synced when the oldest one is given back."""
    disk = MemoryDisk()
    threads = LateFutures(random.Random(place), eager=0.0)
    log = FlashLog(disk, LAZY, threads, random.Random(1).randbytes)
    log.append([block_of(1)])
    log.sync()

    def blocks() -> Iterator[tuple[BlockHeader, memoryview]]:
        for number in range(100, 140):
            if name_of(1) not in disk.files:
                return
            yield block_of(1 if number == place else number)

    log.append(blocks())
    assert name_of(1) not in disk.files
    is_known = log.catalog.find([key_of(1)])[0] > 0
    disk.crash(lambda size: 0)
    assert not is_known or read(open_log(disk, seed=place), 1) == payload_of(1)


@given(seed=st.integers(0, 1 << 30), files=st.integers(3, 5))
def test_a_disk_with_less_room_than_the_log_may_have_takes_what_comes(
    seed: int, files: int
) -> None:
    """What it has room for is the limit then; of nothing else is it a fault."""
    chance, model = random.Random(seed), Model()
    bad = BadDisk(chance, model)
    bad.disk.room = files * SMALL.segment_bytes + chance.randrange(SMALL.segment_bytes)
    for start in range(2):
        model.log = None
        model.log = log = open_log(bad.disk, LAZY, seed=start, late=True)
        for _ in range(3):
            for what, value in some_steps(chance):
                model.step(log, what, value)
            model.check(log)
        assert log.catalog.counts["write_faults"] == 0
        assert bad.disk.taken() <= log.total_bytes or log.total_bytes == SMALL.flash_bytes
        bad.disk.crash(lambda size: chance.choice((0, size, chance.randrange(size + 1))))


def full_at_four() -> tuple[MemoryDisk, FlashLog]:
    """Return a log of at most five files on a disk with room for four, full of blocks that are
    used."""
    disk = MemoryDisk()
    disk.room = 4 * SMALL.segment_bytes
    log = open_log(disk)
    number = 100
    while len(disk.files) < 4:
        log.append([block_of(number)])
        number += 1
    log.append([block_of(1)])
    while log.total_bytes == SMALL.flash_bytes:
        log.catalog.use([key_of(1), key_of(100)])
        log.append([block_of(number)])
        number += 1
    return disk, log


def test_a_full_disk_is_the_limit_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    disk, log = full_at_four()
    for number in range(300, 500):
        assert log.append([block_of(number)]) == 1
    log.flush()
    assert log.total_bytes == disk.taken() == 4 * SMALL.segment_bytes
    assert read(log, 499) == payload_of(499) and read(log, 300) is None
    (said,) = (each for each in caplog.records if "store.flash_bytes" in each.message)
    assert said.levelno == logging.WARNING
    for each in ("No space left", SMALL.flash_bytes, 4 * SMALL.segment_bytes):
        assert str(each) in said.message


def test_what_is_used_is_kept_when_the_disk_turns_out_to_be_full() -> None:
    """There is no file to copy it to before one has gone."""
    _, log = full_at_four()
    log.flush()
    assert log.catalog.counts["freed_files"] == 2
    assert read(log, 1) == payload_of(1) and read(log, 100) == payload_of(100)
    assert log.catalog.counts["copied_blocks"] >= 1


def test_a_disk_that_shrinks_lowers_the_limit_once_more_and_not_below_three_files(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, log = full_at_four()
    disk.room = 3 * SMALL.segment_bytes
    log.append(block_of(number) for number in range(300, 400))
    assert log.total_bytes == 3 * SMALL.segment_bytes
    disk.room = 2 * SMALL.segment_bytes
    with pytest.raises(Unavailable, match="No space left"):
        log.append(block_of(number) for number in range(400, 500))
    assert log.total_bytes == 3 * SMALL.segment_bytes
    disk.room = None
    assert log.append(block_of(number) for number in range(500, 600)) == 100
    log.flush()
    assert read(log, 599) == payload_of(599) and len(disk.files) == 3
    assert len([each for each in caplog.messages if "store.flash_bytes" in each]) == 1


def test_a_write_for_which_there_is_no_room_is_the_limit_too() -> None:
    """Some file systems promise a file its space, and have it not when it is written."""
    disk = MemoryDisk()
    log = open_log(disk)
    while len(disk.files) < 4:
        log.append(block_of(number) for number in range(3))
    disk.is_full = True
    with pytest.raises(Unavailable, match="No space left"):
        log.append(block_of(number) for number in range(40))
    assert log.total_bytes < SMALL.flash_bytes
    disk.is_full = False  # as soon as the oldest file has gone
    assert log.append(block_of(number) for number in range(40)) == 40
    log.flush()
    assert disk.taken() <= log.total_bytes < SMALL.flash_bytes
    assert read(log, 39) == payload_of(39)


def test_a_failed_file_made_ahead_is_made_when_it_is_needed() -> None:
    """The disk was full a while ago; it is not now."""
    disk = MemoryDisk()
    disk.refuses = lambda what, name: "No space left" if name == name_of(2) else None
    log = open_log(disk)
    log.append([block_of(1)])
    log.flush()
    disk.refuses = lambda what, name: None
    assert log.append(block_of(number) for number in range(2, 20)) == 18
    log.flush()
    assert log.catalog.counts["write_faults"] == 0 and read(log, 19) == payload_of(19)


def test_a_name_that_is_taken_stops_nobody_for_ever() -> None:
    disk = MemoryDisk()
    disk.refuses = lambda what, name: (
        "File exists" if (what, name) == ("create", name_of(1)) else None
    )
    log = open_log(disk)
    with pytest.raises(Unavailable, match="File exists"):
        log.append([block_of(1)])
    log.append([block_of(1)])
    log.flush()
    assert read(log, 1) == payload_of(1)


def test_a_format_that_is_not_known_is_kept_and_named() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    log.append([block_of(1)])
    log.close()
    content = disk.files[name_of(1)]
    content.data[8] = 9
    content.data[48:56] = records._sum(bytes(content.data[: records._FILE.size - 8])).to_bytes(
        8, "little"
    )
    with pytest.raises(Unavailable, match="has format version 9; this program knows 1"):
        open_log(disk)
    assert name_of(1) in disk.files


def test_what_is_carried_from_two_files_is_all_there_in_the_end() -> None:
    """Room for a file is made twice: by the log's own limit, and again since a neighbour has taken
    what was given back."""
    disk = MemoryDisk()
    log = open_log(disk)
    assert log.append([block_of(1)]) == 1
    number = 100
    while len(disk.files) < 5:
        log.append([block_of(number)])
        number += 1
    log.flush()
    log.catalog.use([key_of(1)])
    log._give_up(Unavailable("a fault"))
    log._background.close()
    log._files.limit_bytes = log._files.used_bytes()
    remove, removed = disk.remove, list[str]()

    def taken(name: str) -> None:
        remove(name)
        removed.append(name)
        disk.room = disk.taken() + SMALL.segment_bytes * (len(removed) > 1)

    disk.remove = taken  # type: ignore[method-assign]
    assert log.append([block_of(number)]) == 1
    log.flush()
    assert len(removed) > 1
    assert read(log, 1) == payload_of(1)


def test_a_disk_that_somebody_else_had_filled_is_used_as_a_whole_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, log = full_at_four()
    assert log.total_bytes == 4 * SMALL.segment_bytes
    disk.room = None
    for number in range(300, 400):
        log.append([block_of(number)])
    assert len(disk.files) == 4
    later_s = time.monotonic() + RAISE_S
    monkeypatch.setattr("time.monotonic", lambda: later_s)
    for number in range(400, 500):
        log.append([block_of(number)])
    log.flush()
    assert log.total_bytes == SMALL.flash_bytes and len(disk.files) == 5
