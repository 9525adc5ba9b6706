"""What was computed upon which block, from files' records alone; and notes beside a log."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_model import WRITERS, block_of, header_of, key_of, open_log, read
from kvass.common.block import BlockHeader
from kvass.common.keys import SEGMENT_BLOCKS
from kvass.kvstore.flash import records
from kvass.kvstore.flash.disk import PAGE
from kvass.kvstore.flash.lineage import computed_upon
from kvass.kvstore.flash.notes import Notes
from kvass.kvstore.flash.records import FileHead, FileIndex
from kvass.kvstore.flash.segment import Segment, name_of
from memory_disk import Killed, MemoryDisk

BLOCKS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 2), st.integers(0, 2)), max_size=12)


def named(number: int, parent: int, writer: int, index: int) -> BlockHeader:
    return msgspec.structs.replace(
        header_of(0),
        key=key_of(number),
        parent=key_of(parent),
        writer=f"w{writer}",
        index=index,
    )


def file_of(headers: list[BlockHeader], sequence: int) -> FileIndex:
    disk = MemoryDisk()
    segment = Segment(disk.create("s", 16 * PAGE), FileHead(bytes(16), sequence, 16 * PAGE))
    for page, header in enumerate(headers):
        segment.add(header, page + 1, 1)
    index = segment.index()
    segment.seal()
    sealed = segment.index()
    assert np.array_equal(index.rows, sealed.rows) and index.origins == sealed.origins
    return sealed


@given(blocks=BLOCKS, files=st.integers(1, 3), wrong=st.sets(st.integers(0, 20), max_size=2))
def test_it_is_what_following_the_parents_gives(
    blocks: list[tuple[int, int, int]], files: int, wrong: set[int]
) -> None:
    """Block n's parent is an earlier block, on any file or on none; a block may be there twice."""
    headers = [
        named(n, min(parent, n) if n % 5 else 20, writer, SEGMENT_BLOCKS - 1 if n % 2 else n)
        for n, (parent, writer, _) in enumerate(blocks)
    ]
    indexes = [
        file_of([h for n, h in enumerate(headers) if n % 3 % files == f or n % 7 == 0], f)
        for f in range(files)
    ]
    there = {row.tobytes() for index in indexes for row in index.rows["key"]}
    bad = {key_of(n) for n in wrong}
    chosen = {h.key for h in headers if h.key in there and (h.writer == "w1" or h.key in bad)}
    while True:
        more = {
            h.key for h in headers if h.key in there and (h.parent in chosen or h.parent in bad)
        } - chosen
        if not more:
            break
        chosen |= more
    found = computed_upon(indexes, "w1", bad)
    assert found.keys == chosen
    assert set(found.ends) == {h.key for h in headers if h.key in chosen and h.index % 32 == 31}


def test_a_log_says_what_was_computed_upon_a_writers_blocks() -> None:
    log = open_log(MemoryDisk())
    log.append(map(block_of, range(6)))
    log.flush()
    found = computed_upon(log.indexes(), WRITERS[1], ())
    assert found.keys == {key_of(n) for n in range(6) if header_of(n).writer == WRITERS[1]}


def test_an_index_of_an_earlier_version_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = MemoryDisk()
    with monkeypatch.context() as patch:
        patch.setattr(records, "INDEX_VERSION", 1)
        log = open_log(disk)
        log.append(map(block_of, range(40)))
        log.close()
    log = open_log(disk)
    assert sum(read(log, number) is not None for number in range(40)) > 20
    log.close()
    assert all(
        records.index_room(memoryview(each.data)[-PAGE:], _id_of(each.data))
        for each in disk.files.values()
    )


def _id_of(data: bytearray) -> bytes:
    head = records.read_file_head(memoryview(data)[:PAGE])
    assert head is not None
    return head.file_id


def test_a_file_that_leaves_no_room_for_the_index_loses_its_last_records_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one is that an earlier version has filled, whose index was smaller."""
    disk = MemoryDisk()
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "room_after", lambda self, end, header: end <= self.head.size)
        log = open_log(disk)
        log.append(block_of(4 * number) for number in range(15))  # 200 bytes each: a page
        log.flush()
    log = open_log(disk)
    there = [read(log, 4 * number) is not None for number in range(15)]
    assert there == [True] * 14 + [False]
    assert not log.catalog.counts["corrupt"]
    log.close()
    again = open_log(disk)
    assert [read(again, 4 * number) is not None for number in range(15)] == there


def test_a_note_is_replaced_whole() -> None:
    disk = MemoryDisk()
    notes = Notes(disk)
    assert notes.read() is None
    for text in (b"one", b"x" * 3 * PAGE, b""):
        notes.write(text)
        assert notes.read() == text and Notes(disk).read() == text
    assert len(disk.files) == 1


@pytest.mark.parametrize("budget", [*range(0, 8), PAGE, PAGE + 1, PAGE + 2, 2 * PAGE, 2 * PAGE + 3])
@pytest.mark.parametrize("power", [False, True])
def test_a_death_in_between_leaves_the_one_before(budget: int, power: bool) -> None:
    disk = MemoryDisk()
    Notes(disk).write(b"before")
    disk.budget = budget
    try:
        Notes(disk).write(b"after" * PAGE)
        done = True
    except Killed:
        done = False
    disk.budget = None
    if power:
        disk.crash(lambda size: size // 2 // PAGE * PAGE)
    found = Notes(disk).read()
    assert found == b"after" * PAGE if done else found in (b"before", b"after" * PAGE)
    Notes(disk).write(b"next")
    assert Notes(disk).read() == b"next" and len(disk.files) == 1


def test_a_damaged_note_is_none_and_other_files_are_left_alone() -> None:
    disk = MemoryDisk()
    disk.create("note-x", PAGE)
    disk.create(name_of(1), PAGE)
    Notes(disk).write(b"text")
    (name,) = (each for each in disk.files if each.startswith("note-0"))
    disk.files[name].data[33] ^= 1
    assert Notes(disk).read() is None
    Notes(disk).write(hashlib.blake2b(b"").digest())
    assert set(disk.files) > {"note-x", name_of(1)}


def test_a_disk_that_refuses_keeps_the_note() -> None:
    disk = MemoryDisk()
    notes = Notes(disk)
    notes.write(b"before")
    for refused in ("create", "write", "sync"):
        disk.refuses = lambda what, name, refused=refused: (  # type: ignore[misc]
            "No space left on device" if what == refused else None
        )
        with pytest.raises(Exception, match="No space left"):
            notes.write(b"after")
        disk.refuses = lambda what, name: None
        assert notes.read() == b"before" and Notes(disk).read() == b"before"
