"""Which flash folder a node takes: its own, if need be a moment later, and never somebody else's
that is in use."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvass.common.errors import Unavailable
from kvass.common.transport.identity import Identity, start_ticks
from kvass.kvstore.flash import own_folder as module
from kvass.kvstore.flash.disk import RealDisk
from kvass.kvstore.flash.own_folder import Owner, own_folder

ME = Identity("host", "start", os.getpid())


def take(root: Path, member_id: str, **how: float) -> tuple[RealDisk, str]:
    disk = own_folder(root, member_id, ME, **how)  # type: ignore[arg-type]
    return disk, disk._folder.path.name


@contextmanager
def taken(root: Path, member_id: str, **how: float) -> Iterator[str]:
    disk, name = take(root, member_id, **how)
    try:
        yield name
    finally:
        disk.close()


def test_nodes_of_one_host_have_a_folder_each_and_find_it_again(tmp_path: Path) -> None:
    with taken(tmp_path, "a") as first, taken(tmp_path, "b") as second:
        assert (first, second) == ("node-0", "node-1")
    with taken(tmp_path, "b") as second, taken(tmp_path, "a") as first:
        assert (first, second) == ("node-0", "node-1"), "in whatever order they come"


def test_a_disk_that_is_not_there_is_named_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unavailable, match=f"store.flash_dir gone/flash: {tmp_path}/gone does not"):
        take(Path("gone/flash"), "a")


def test_its_own_folder_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node that is started right after its predecessor was killed found the folder still locked,
    took another one, and had none of its blocks."""
    caplog.set_level(logging.INFO)
    disk, name = take(tmp_path, "a")
    begun_s = time.monotonic()
    threading.Timer(1.0, disk.close).start()
    with taken(tmp_path, "a") as again:
        assert again == name
        assert 0.9 < time.monotonic() - begun_s < 5
    assert f"uses {tmp_path / name}, its own" in caplog.text


def test_who_has_it_for_good_keeps_it_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with taken(tmp_path, "a") as first:
        begun_s = time.monotonic()
        with taken(tmp_path, "a") as second:
            assert first != second
            assert time.monotonic() - begun_s < 4, "its process runs, and goes on"
    assert "node-0 was a's" in caplog.text and "a second node run under this id" in caplog.text


def test_a_new_id_takes_what_is_free_first_what_is_nobodys(tmp_path: Path) -> None:
    with taken(tmp_path, "a"):
        RealDisk(tmp_path / "node-1").close()  # as an earlier version left it
        with taken(tmp_path, "c") as name:
            assert name == "node-1"


def test_a_new_id_leaves_to_others_what_is_theirs(tmp_path: Path) -> None:
    """`kvass up --store 3` after `--store 2`: the new node may be the first to look."""
    for id_ in ("store-0", "store-1"):
        with taken(tmp_path, id_):
            pass
    ended_owner(tmp_path / "node-0", "store-0")
    begun_s = time.monotonic()
    with taken(tmp_path, "store-2") as third:
        assert third == "node-2" and time.monotonic() - begun_s < 1
        with taken(tmp_path, "store-1") as second, taken(tmp_path, "store-0") as first:
            assert (first, second) == ("node-0", "node-1")
    with taken(tmp_path, "store-2") as third:
        assert third == "node-2"


def test_when_there_can_be_no_more_folders_one_that_lies_idle_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDERS_MAX", 2)
    with taken(tmp_path, "a"), taken(tmp_path, "b"):
        pass
    with taken(tmp_path, "c") as name:
        assert name == "node-0"


def test_a_second_one_of_an_id_does_not_become_who_is_found_again(tmp_path: Path) -> None:
    RealDisk(tmp_path / "node-1").close()
    disk, name = take(tmp_path, "a")
    assert name == "node-1"
    with taken(tmp_path, "a") as second:
        assert second == "node-0"
    disk.close()
    with taken(tmp_path, "a") as again:
        assert again == "node-1", "where its blocks are"


def ended_owner(folder: Path, member_id: str) -> str:
    """Let a process that is over be the one that had a folder; `{pid}` in its id is its own."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ticks = start_ticks(ended.pid) or 0
    ended.wait()
    owner = Owner(member_id.format(pid=ended.pid), "host", ended.pid, ticks)
    (folder / "lock").write_text(owner.text())
    return owner.member_id


def test_an_id_made_for_one_start_takes_the_folder_of_another_such(tmp_path: Path) -> None:
    """`kvass store` without `--id`: its process may be over, or ending."""
    disk, name = take(tmp_path, "store-host-7")
    ended_owner(tmp_path / name, "store-host-{pid}")
    threading.Timer(0.5, disk.close).start()
    with taken(tmp_path, "store-host-8") as again:
        assert again == name
    ended_owner(tmp_path / name, "store-host-{pid}")
    with taken(tmp_path, "store-host-9") as again:
        assert again == name


def test_a_folder_of_another_host_is_not_waited_for(tmp_path: Path) -> None:
    disk, name = take(tmp_path, "a")
    (tmp_path / name / "lock").write_text(Owner("a", "another", 1, 1).text())
    begun_s = time.monotonic()
    with taken(tmp_path, "b") as other:
        assert other != name and time.monotonic() - begun_s < 1
    disk.close()


@pytest.mark.parametrize("text", ["", "x", "a b c d", "\xff\x00"])
def test_a_lock_file_that_says_nothing_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-0" / "lock").write_text(text, encoding="latin-1")
    with taken(tmp_path, "a") as name:
        assert name == "node-0"


def test_more_nodes_than_there_are_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDERS_MAX", 1)
    with taken(tmp_path, "a"), pytest.raises(Unavailable, match="serves 1 nodes already"):
        take(tmp_path, "b")
