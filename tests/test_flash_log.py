"""The flash log: what is there after any death, what is not after a drop, and no wrong byte ever.

Deaths come at any byte of any write. A process that is killed leaves what it wrote; with the power
everything unsynced goes, or a part of it.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_model import (
    SMALL,
    TENANTS,
    WRITERS,
    Model,
    block_of,
    check_erased,
    header_of,
    key_of,
    open_log,
    payload_of,
    read,
)
from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.log import FlashLog
from kvass.kvstore.flash.records import DropOrder, record_head
from kvass.kvstore.flash.segment import name_of
from kvass.kvstore.flash.table import hash_of, hashes_of
from memory_disk import Killed, MemoryDisk

NUMBERS = st.integers(0, 30)
DEATHS, SOAKED = 20, 1000  # writes of a history; examples from which on it is a soak
PUTS = st.tuples(st.just("put"), st.lists(NUMBERS, min_size=1, max_size=6))
OTHERS = st.one_of(
    st.tuples(st.just("sync"), st.none()),
    st.tuples(st.just("use"), NUMBERS),
    st.tuples(
        st.just("drop"),
        st.one_of(
            st.builds(lambda w: DropOrder(writer=w), st.sampled_from(WRITERS)),
            st.builds(lambda t: DropOrder(tenant=t), st.sampled_from(TENANTS)),
            st.builds(lambda n: DropOrder(namespace=bytes([n]) * 32), st.integers(0, 1)),
            st.builds(
                lambda n: DropOrder(keys=tuple(key_of(i) for i in n)), st.lists(NUMBERS, max_size=3)
            ),
        ),
    ),
)
STEPS = st.lists(st.one_of(PUTS, PUTS, OTHERS), min_size=1, max_size=25)


@given(
    lives=st.lists(st.tuples(STEPS, st.integers(0, 400_000), st.booleans()), max_size=4),
    seed=st.integers(0, 1 << 30),
    late=st.booleans(),
)
def test_after_any_death(
    lives: list[tuple[list[tuple[str, object]], int, bool]], seed: int, late: bool
) -> None:
    disk, model, chance = MemoryDisk(), Model(), random.Random(seed)
    disk.refuses = model.see
    for life, (steps, budget, power_goes) in enumerate(lives):
        disk.budget = budget
        try:
            model.log = None
            model.log = log = open_log(disk, seed=seed + life, late=late)
            model.check(log)
            for what, value in steps:
                model.step(log, what, value)
                check_erased(disk, model.possible)
        except Killed:
            pass
        if power_goes:
            disk.crash(lambda size: chance.choice((0, size, chance.randrange(size + 1))))
        disk.budget = None
    model.log = None
    log = open_log(disk, seed=seed + 99)
    model.check(log)
    # Once more: what recovery wrote must be right too.
    log.close()
    model.check(open_log(disk, seed=seed + 100))


@given(at=st.integers(0, 140_000), seed=st.integers(0, 1000), power_goes=st.booleans())
def test_a_drop_that_was_cut_off_is_finished_by_the_next_start(
    at: int, seed: int, power_goes: bool
) -> None:
    """Once the note of it lasts, nothing that it names is ever found again."""
    disk, chance = MemoryDisk(), random.Random(seed)
    log = open_log(disk, seed=seed)
    log.append(block_of(number) for number in range(12))
    log.sync()
    disk.budget = at
    try:
        log.drop(DropOrder(tenant=TENANTS[0]))
    except Killed:
        if power_goes:
            disk.crash(lambda size: chance.randrange(size + 1))
    disk.budget = None
    note = msgspec.msgpack.encode(DropOrder(tenant=TENANTS[0]))
    noted = any(note in content.data for content in disk.files.values())
    log = open_log(disk, seed=seed + 1)
    for number in range(12):
        found = read(log, number)
        if number % 3:
            assert found == payload_of(number)
        elif noted:
            assert found is None
    if noted:
        check_erased(disk, {number for number in range(12) if number % 3})


def filled(disk: MemoryDisk, count: int = 12) -> FlashLog:
    log = open_log(disk)
    log.append(block_of(number) for number in range(count))
    log.sync()
    return log


def test_a_sealed_file_is_not_read_through() -> None:
    disk = MemoryDisk()
    filled(disk, 20).close()
    sealed = name_of(1)
    reads: list[int] = []
    disk.refuses = lambda what, name: reads.append(1) if (what, name) == ("read", sealed) else None
    log = open_log(disk)
    assert len(log.catalog) == 20 or log.catalog.counts["freed_files"]
    assert len(reads) == 2, "its head and its index"


def test_flipped_bits_are_misses_and_no_bytes() -> None:
    disk = MemoryDisk()
    log = filled(disk)
    chance = random.Random(1)
    for content in disk.files.values():
        for _ in range(60):
            content.data[chance.randrange(PAGE, len(content.data))] ^= 1 << chance.randrange(8)
    found = [read(log, number) for number in range(12)]
    assert all(got in (None, payload_of(n)) for n, got in enumerate(found)) and None in found
    assert log.catalog.counts["corrupt"] == found.count(None)
    again = open_log(disk, seed=1)
    assert all(read(again, n) in (None, payload_of(n)) for n in range(12))


def test_a_file_cut_short_costs_only_what_was_cut() -> None:
    disk = MemoryDisk()
    log = filled(disk)
    name = name_of(1)
    del disk.files[name].data[9 * PAGE :]
    assert all(read(log, n) in (None, payload_of(n)) for n in range(12))
    again = open_log(disk, seed=1)
    found = [read(again, n) for n in range(12)]
    assert all(got in (None, payload_of(n)) for n, got in enumerate(found))
    assert found[0] is not None


@pytest.mark.parametrize("what", ["create", "write", "sync"])
def test_a_disk_that_fails_loses_no_block_that_was_there(what: str) -> None:
    disk = MemoryDisk()
    log = filled(disk)
    disk.refuses = lambda doing, name: "No space left on device" if doing == what else None
    with pytest.raises(Unavailable, match=f"cannot {what} segment-.*No space left"):
        for _ in range(9):
            log.append(block_of(number) for number in range(12, 24))
            log.sync()
    assert log.catalog.counts["write_faults"] == 1
    assert all(read(log, n) == payload_of(n) for n in range(6))
    disk.refuses = lambda doing, name: None
    assert log.append([block_of(25)]) == 1
    log.flush()
    assert read(log, 25) == payload_of(25)
    log.sync()
    assert read(open_log(disk, seed=1), 25) == payload_of(25)


def test_a_file_that_cannot_be_sealed_in_the_background_is_told_and_served() -> None:
    disk = MemoryDisk()
    first = name_of(1)
    disk.refuses = lambda what, name: "I/O error" if (what, name) == ("sync", first) else None
    # No bound on unsynced bytes comes in between: only the seal syncs.
    settings = replace(SMALL, unsynced_bytes=1 << 20)
    with ThreadPoolExecutor(2) as threads:
        log = FlashLog(disk, settings, threads, random.Random(1).randbytes)
        assert log.append(block_of(number) for number in range(12)) == 12
        with pytest.raises(Unavailable, match=f"cannot sync {first}: I/O error"):
            log.sync()
        disk.refuses = lambda what, name: None
        log.flush()
        assert all(read(log, number) == payload_of(number) for number in range(6))
        log.close()
    again = open_log(disk, seed=2)
    assert all(read(again, number) in (None, payload_of(number)) for number in range(12))
    assert read(again, 0) == payload_of(0)


@pytest.mark.parametrize("what", ["open", "read"])
def test_a_file_that_cannot_be_read_at_the_start_is_kept(what: str) -> None:
    """Rights that are missing and descriptors that have run out pass; what was removed does not
    come back."""
    disk = MemoryDisk()
    log = filled(disk)
    log.sync()
    log.close()
    names = sorted(disk.names())
    assert len([name for name in names if name.startswith("segment-")]) > 1
    disk.refuses = lambda done, name: "Permission denied" if done == what else None
    with pytest.raises(Unavailable, match="Permission denied"):
        open_log(disk)
    assert sorted(disk.names()) == names
    disk.refuses = lambda done, name: None
    again = open_log(disk)
    assert all(read(again, number) == payload_of(number) for number in range(12))


def test_a_read_error_is_a_miss() -> None:
    disk = MemoryDisk()
    log = filled(disk)
    disk.refuses = lambda what, name: "Input/output error" if what == "read" else None
    assert read(log, 3) is None and log.catalog.counts["read_faults"] == 1
    disk.refuses = lambda what, name: None
    assert read(log, 3) == payload_of(3)


def test_a_drop_reaches_a_full_disk_and_says_what_it_could_not_do() -> None:
    disk = MemoryDisk()
    log = filled(disk)
    disk.refuses = lambda what, name: "No space left on device" if what == "create" else None
    log.drop(DropOrder(tenant=TENANTS[1]))
    check_erased(disk, {n for n in range(12) if n % 3 != 1})
    disk.refuses = lambda what, name: "Input/output error" if what == "write" else None
    with pytest.raises(Unavailable):
        log.drop(DropOrder(tenant=TENANTS[0]))


def test_what_was_used_is_copied_forward_and_write_amplification_counted() -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    log.append([block_of(1)])
    for number in range(100, 400):
        log.catalog.use([key_of(1)])
        log.append([block_of(number)])
    log.flush()
    assert read(log, 1) == payload_of(1) and read(log, 100) is None
    counts = log.catalog.counts
    assert counts["freed_files"] > 10 and counts["copied_blocks"] >= counts["freed_files"] // 5
    assert counts["copied_bytes"] < counts["appended_bytes"] / 2
    assert len(disk.files) <= SMALL.flash_bytes // SMALL.segment_bytes


def test_a_block_too_large_for_a_file_is_left_out() -> None:
    log = open_log(MemoryDisk())
    header = header_of(1)
    large = msgspec.structs.replace(header, length=SMALL.segment_bytes, checksums=(1, 2))
    assert log.append([(large, memoryview(bytes(large.length))), block_of(2)]) == 1
    log.flush()
    assert log.catalog.counts["too_large"] == 1 and read(log, 2) == payload_of(2)


def history(log: FlashLog, model: Model) -> None:
    """Fill the log several times over, with all that can happen in between."""
    chance = random.Random(5)
    for turn in range(12):
        model.step(log, "put", chance.sample(range(31), 5))
        model.step(log, "use", chance.randrange(31))
        if turn % 3 == 0:
            model.step(log, "sync", None)
        if turn % 5 == 4:
            model.step(log, "drop", DropOrder(tenant=TENANTS[turn % 3]))


@pytest.mark.parametrize("lasts", [0.0, 0.5, 1.0])
def test_death_before_in_and_after_every_write_of_a_history(lasts: float) -> None:
    """`lasts`: which part of each unsynced write the power cut leaves. The soak dies at each write,
    `make test` at some of them."""
    chance = random.Random(lasts)
    ends: list[int] = []
    disk = MemoryDisk()
    disk.refuses = lambda what, name: ends.append(disk.written)
    history(open_log(disk), Model())
    deaths = sorted(set(ends))
    if settings.default is None or settings.default.max_examples < SOAKED:
        deaths = chance.sample(deaths, DEATHS)
    for end in deaths:
        for budget in (end, end + 3000):
            disk, model = MemoryDisk(), Model()
            disk.budget, disk.refuses = budget, model.see
            try:
                model.log = open_log(disk)
                history(model.log, model)
            except Killed:
                pass
            disk.crash(lambda size: int(size * lasts))
            model.log = None
            model.check(open_log(disk, seed=1))


@pytest.mark.parametrize(("file_id", "page"), [(b"i" * 16, 2), (None, 9)])
def test_a_record_inside_a_payload_is_none(file_id: bytes | None, page: int) -> None:
    """A torn record is looked through page by page: what its payload holds must not pass for one,
    whether it names another file or another place."""
    disk = MemoryDisk()
    log = open_log(disk)
    log.append([block_of(0)])
    own_id = next(iter(log.catalog.segments.values())).head.file_id
    inner = header_of(3)
    record = record_head(inner, file_id or own_id, page * PAGE) + payload_of(3)
    outer = msgspec.structs.replace(header_of(1), length=4 * PAGE, checksums=(1,))  # a wrong one
    before = PAGE - len(record_head(outer, own_id, 0))  # so that it begins on a page
    payload = (bytes(before) + record).ljust(outer.length, b"\0")
    log.append([(outer, memoryview(payload))])
    log.flush()
    again = open_log(disk, seed=1)
    assert read(again, 0) == payload_of(0) and len(again.catalog) == 1


@given(keys=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4))
def test_one_key_is_hashed_as_many_are(keys: list[bytes]) -> None:
    keys = [bytes(32), (1).to_bytes(32, "little"), *keys]
    assert [hash_of(key) for key in keys] == hashes_of(keys).tolist()
