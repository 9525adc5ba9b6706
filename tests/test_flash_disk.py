"""The real disk under the flash log: a folder, with direct I/O and without."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from flash_model import SMALL, block_of, open_log, payload_of, read
from kvass.common.errors import Unavailable
from kvass.kvstore.flash.disk import PAGE, RealDisk, page_memory
from kvass.kvstore.flash.segment import name_of


@pytest.fixture(params=["direct", "buffered"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`buffered`: a file system that refuses O_DIRECT, after it has made the file."""
    if request.param == "buffered":
        opened = os.open

        def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                if flags & os.O_CREAT:
                    os.close(opened(path, flags & ~os.O_DIRECT, mode))
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, mode)

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
    with pytest.raises(Unavailable, match=r"flash: cannot open nothing: No such file"):
        disk.open("nothing")
    file = disk.create("a", PAGE)
    monkeypatch.setattr(os, "pwrite", lambda *given: 100)
    with pytest.raises(Unavailable, match=r"cannot write a: 100 of 4096 bytes were written"):
        file.write(0, page_memory(PAGE))

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match="cannot create b: No space left on device"):
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
