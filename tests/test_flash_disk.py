"""The real disk under the flash log: a folder, with direct I/O and without."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from flash_model import SMALL, block_of, open_log, payload_of, read
from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import PAGE, RealDisk, page_memory
from kvass.kvstore.flash.records import DropOrder
from kvass.kvstore.flash.segment import name_of


@pytest.fixture(params=["direct", "buffered"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`buffered`: a file system that refuses O_DIRECT, after it has made the file."""
    if request.param == "buffered":
        opened = os.open

        def refuse(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_DIRECT:
                if flags & os.O_CREAT:
                    os.close(opened(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd))
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse)
    return tmp_path / "made" / "flash"


def test_what_is_written_is_there_after_a_restart(folder: Path) -> None:
    log = open_log(RealDisk(folder))
    assert log.append(block_of(number) for number in range(12)) == 12
    log.flush()
    assert all(read(log, number) == payload_of(number) for number in range(12))
    log.close()
    again = open_log(RealDisk(folder), seed=1)
    assert all(read(again, number) == payload_of(number) for number in range(12))
    again.close()
    assert all(each.stat().st_mode & 0o077 == 0 for each in folder.iterdir()), "nobody else's"


def test_a_file_cut_short_is_read_to_its_end(folder: Path) -> None:
    disk = RealDisk(folder)
    file = disk.create("a", 4 * PAGE)
    data = page_memory(PAGE)
    data[:] = b"x" * PAGE
    file.write(2 * PAGE, data)
    file.sync()
    os.truncate(folder / "a", 2 * PAGE + 100)
    room = page_memory(4 * PAGE)
    assert file.read(0, room) == 2 * PAGE + 100
    assert bytes(room[2 * PAGE : 2 * PAGE + 100]) == b"x" * 100
    assert file.read(3 * PAGE, room) == 0
    file.close()
    disk.remove("a")
    assert disk.names() == []
    disk.close()


def test_one_folder_is_one_node_s(folder: Path) -> None:
    disk = RealDisk(folder)
    with pytest.raises(Unavailable, match="belongs to another store node that is running"):
        RealDisk(folder)
    disk.close()
    RealDisk(folder).close()


def test_faults_name_the_file_and_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk(folder)
    with pytest.raises(Unavailable, match=r"flash: cannot open .*/flash/nothing: No such"):
        disk.open("nothing")
    file = disk.create("a", PAGE)
    monkeypatch.setattr(os, "pwrite", lambda *given: 100)
    with pytest.raises(
        Unavailable, match=r"cannot write .*/flash/a: 100 of 4096 bytes were written"
    ):
        file.write(0, page_memory(PAGE))

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match=r"cannot create .*/b: No space left on device"):
        disk.create("b", PAGE)
    assert disk.names() == ["a"], "what could not be made whole is not left behind"
    file.close()
    disk.close()
    (folder / "in the way").touch()
    with pytest.raises(Unavailable, match=r"cannot use .*in the way"):
        RealDisk(folder / "in the way")


def test_a_segment_that_is_gone_from_the_disk_is_misses(folder: Path) -> None:
    log = open_log(RealDisk(folder))
    log.append(block_of(number) for number in range(12))
    log.close()
    (folder / name_of(1)).unlink()
    again = open_log(RealDisk(folder), SMALL, seed=1)
    found = [read(again, number) for number in range(12)]
    assert None in found and found[11] == payload_of(11)
    assert all(got in (None, payload_of(number)) for number, got in enumerate(found))
    again.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def removed_and_open(folder: Path) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in links if link.startswith(str(folder)) and "deleted" in link]


def test_a_folder_that_is_removed_is_made_again_and_locked(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(RealDisk(folder))
    log.append(block_of(number) for number in range(12))
    log.sync()
    shutil.rmtree(folder)
    with pytest.raises(Unavailable, match=r"cannot list|somebody has removed"):
        log.sync()
    for turn in range(6):  # as many blocks as several files hold
        log.append(block_of(number) for number in range(12 + turn, 24 + turn))
        log.flush()
    assert f"{folder} was removed" in caplog.text and "gone with the folder" in caplog.text
    assert not removed_and_open(folder), "the disk has its room back"
    with pytest.raises(Unavailable, match="belongs to another store node that is running"):
        RealDisk(folder)
    log.sync()
    there = [number for number in range(30) if read(log, number) is not None]
    assert 28 in there and all(read(log, n) == payload_of(n) for n in there)
    log.close()
    again = open_log(RealDisk(folder), seed=1)
    assert [number for number in range(30) if read(again, number) is not None] == there
    again.close()


def test_a_folder_that_another_node_has_made_meanwhile_is_not_written_into(folder: Path) -> None:
    log = open_log(RealDisk(folder))
    log.append([block_of(1)])
    log.flush()
    shutil.rmtree(folder)
    other = RealDisk(folder)
    with pytest.raises(Unavailable, match="belongs to another store node that is running"):
        for turn in range(9):
            log.append(block_of(number) for number in range(12 * turn, 12 * turn + 12))
            log.flush()
    assert other.names() == []
    other.close()
    for turn in range(9):
        log.append(block_of(number) for number in range(12 * turn, 12 * turn + 12))
        log.flush()
    assert read(log, 107) == payload_of(107)
    log.close()


def test_what_is_no_file_of_the_log_is_left_alone_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = open_log(RealDisk(folder))
    log.append(block_of(number) for number in range(12))
    log.close()
    (folder / name_of(4)).mkdir()
    os.mkfifo(folder / name_of(5))
    (folder / "segment-1.bak").write_bytes(b"somebody's")
    again = open_log(RealDisk(folder), seed=1)
    assert all(read(again, number) == payload_of(number) for number in range(12))
    refused = 0
    for _ in range(9):  # over the names that are taken
        try:
            again.append(block_of(number) for number in range(12, 24))
            again.flush()
        except Unavailable as error:
            assert "File exists" in str(error)
            refused += 1
    assert 1 <= refused <= 2, "each name once"
    assert read(again, 23) == payload_of(23)
    again.close()
    for name in (name_of(4), name_of(5), "segment-1.bak"):
        assert (folder / name).exists() and name in caplog.text


def test_descriptors_are_counted_and_what_cannot_be_opened_is_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = replace(SMALL, flash_bytes=40 * SMALL.segment_bytes)
    log = open_log(RealDisk(folder), many)
    for number in range(100):
        log.append([block_of(number)])
        log.sync()
    log.close()
    names = {path.name for path in folder.glob("segment-*")}
    assert len(names) > 12
    few = replace(many, files_max=6)
    before = open_descriptors()
    again = open_log(RealDisk(folder), few, seed=1)
    assert open_descriptors() <= before + 2 + 6
    assert f"of {len(names)} files are not opened, since 6 may be open at once" in caplog.text
    found = [number for number in range(100) if read(again, number) is not None]
    assert found and found == list(range(found[0], 100)), "the newest"
    kept = set(sorted(names)[:-6])
    for number in range(100, 160):
        again.append([block_of(number)])
        again.flush()
        assert open_descriptors() <= before + 2 + 7, "the spare one is made before it is counted"
    assert read(again, 159) == payload_of(159)
    with pytest.raises(Unavailable, match="could not be opened were not erased"):
        again.drop(DropOrder(writer="nobody"))
    again.close()
    assert kept <= {path.name for path in folder.glob("segment-*")}, "nothing of it is deleted"
    third = open_log(RealDisk(folder), many, seed=2)
    assert read(third, 0) == payload_of(0) and read(third, 159) == payload_of(159)
    third.close()


@pytest.mark.parametrize("what", ["open", "fallocate", "sync"])
def test_descriptors_that_run_out_while_it_runs_cost_writes_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    log = open_log(RealDisk(folder))
    log.append(block_of(number) for number in range(6))
    log.sync()
    with monkeypatch.context() as patch:

        def exhausted(*given: object, **named: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        name = {"open": "open", "fallocate": "posix_fallocate", "sync": "fdatasync"}[what]
        patch.setattr(os, name, exhausted)
        with pytest.raises(Unavailable, match="Too many open files"):
            for turn in range(9):
                log.append(block_of(number) for number in range(12 * turn, 12 * turn + 12))
                log.sync()
        assert read(log, 0) in (None, payload_of(0))
    log.append([block_of(200)])
    log.sync()
    assert read(log, 200) == payload_of(200)
    log.close()


@pytest.mark.parametrize("what", ["preadv", "fdatasync", "unlink"])
def test_a_start_that_fails_leaves_nothing_open(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    log = open_log(RealDisk(folder))
    log.append(block_of(number) for number in range(12))
    log.flush()  # the last file is not sealed: the next start reads it through
    before = open_descriptors()
    log._disk.close()
    disk = RealDisk(folder)
    calls = [0]
    done = getattr(os, what)

    def sometimes(*given: object, **named: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(errno.EIO, "Input/output error")
        return done(*given, **named)

    failed = 0
    for nth in range(1, 20):
        calls[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, what, sometimes)
            try:
                again = open_log(disk, seed=nth)
            except Unavailable:
                failed += 1
            else:
                again._files.close()
        assert open_descriptors() == before, nth
    assert failed
    disk.close()
