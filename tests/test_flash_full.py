"""A disk that is really full under the flash tier: by others' files, then said, read from, and
written to again when there is room; by the log's own, then a smaller log.

The disk is a small file system in memory, where this user may mount one, if need be as the owner of
a user namespace of his own; elsewhere a bound on the size of files stands for it, of which the
kernel says another word.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from flash_model import SMALL, key_of, payload_of
from kvass.kvstore.flash.disk import RealDisk
from kvass.kvstore.node.tiers.flash_tier import ASIDE_S
from test_tiers import Stage

pytestmark = pytest.mark.anyio
ROOM = 3 * SMALL.segment_bytes  # of the five that the log may have
OWN_SPACE = ("unshare", "--user", "--map-root-user", "--mount")


@dataclass
class Full:
    """A folder on a disk that is full when `fill` was called, until `empty` is; and what the
    kernel says of it then."""

    folder: Path
    fill: Callable[[], None]
    empty: Callable[[], None]
    reason: str


@contextmanager
def small_disk(folder: Path, size: int = ROOM) -> Iterator[Full]:
    """Mount a file system; raises OSError where this user may not."""
    folder.mkdir()
    options = ("mount", "-t", "tmpfs", "-o", f"size={size}", "kvass-test", str(folder))
    if shutil.which("mount") is None or subprocess.run(options, capture_output=True).returncode:
        raise PermissionError
    junk = folder / "somebody's"

    def fill() -> None:
        left = os.statvfs(folder)
        junk.write_bytes(bytes(left.f_bavail * left.f_bsize))

    try:
        yield Full(folder / "flash", fill, junk.unlink, "No space left on device")
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)


@contextmanager
def bound_on_files(folder: Path) -> Iterator[Full]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def bound(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    try:
        yield Full(folder, lambda: bound(4096), lambda: bound(soft), "File too large")
    finally:
        bound(soft)


async def lives_through(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    async with anyio.create_task_group() as tasks:
        stage = Stage(RealDisk(full.folder), tasks)
        totals = stage.tiers.totals

        async def sink(*numbers: int) -> None:
            for number in numbers:
                stage.put(number)
            stage.tiers.asked([key_of(number) for number in numbers])
            await stage.tiers.sink()

        await sink(*range(6))
        assert totals()["flash_blocks"] == 6 and not totals()["flash_full"]
        full.fill()
        for number in range(6, 30, 3):  # more than the file that is being written takes
            await sink(number, number + 1, number + 2)
        assert totals()["flash_full"] == 1 and totals()["flash_refused"] > 0
        said = [line for line in caplog.messages if "nothing is written to flash" in line]
        assert len(said) == 1, "once, not for every block"
        assert f"{full.folder}/segment-" in said[0] and full.reason in said[0]
        for number in range(6):
            if stage.read(number) is not None:
                stage.evict(number)
        await stage.rise([key_of(number) for number in range(6)])
        assert [stage.read(number) for number in range(6)] == [payload_of(n) for n in range(6)]
        before = totals()["flash_blocks"]
        full.empty()
        await sink(30)
        assert totals()["flash_blocks"] == before, "it looks again after a while"
        stage.clock.time_s += ASIDE_S
        await sink(31, 32, 33)
        assert not totals()["flash_full"] and totals()["flash_blocks"] == before + 3
        assert {path.name[:8] for path in full.folder.iterdir()} == {"lock", "segment-"}
        stage.log.close()
        tasks.cancel_scope.cancel()


def passes_in_a_space_of_its_own(basetemp: Path, name: str) -> bool:
    """Run a test below as the owner of a user namespace; False where there are none."""
    if "KVASS_OWN_SPACE" in os.environ or shutil.which(OWN_SPACE[0]) is None:
        return False
    if subprocess.run((*OWN_SPACE, "true"), capture_output=True).returncode:
        return False
    pytest_here = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"{__file__}::{name}",
    )
    done = subprocess.run(
        (*OWN_SPACE, *pytest_here, f"--basetemp={basetemp}"),
        env=os.environ | {"KVASS_OWN_SPACE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return True


async def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Here, if this user may mount; else in a user namespace; else with a bound instead."""
    caplog.set_level(logging.WARNING)
    try:
        with small_disk(tmp_path / "disk") as full:
            await lives_through(full, caplog)
    except PermissionError:
        if not passes_in_a_space_of_its_own(tmp_path / "own", "test_a_full_disk"):
            with bound_on_files(tmp_path / "flash") as full:
                await lives_through(full, caplog)


async def test_files_that_may_not_be_larger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with bound_on_files(tmp_path / "flash") as full:
        await lives_through(full, caplog)


async def lives_in(full: Full, caplog: pytest.LogCaptureFixture) -> None:
    async with anyio.create_task_group() as tasks:
        stage = Stage(RealDisk(full.folder), tasks)
        for number in range(60):  # three times what there is room for
            stage.put(number)
            stage.tiers.asked([key_of(number)])
            await stage.tiers.sink()
            stage.evict(number)
        totals = stage.tiers.totals()
        assert not totals["flash_full"] and not totals["flash_refused"]
        assert totals["flash_total_bytes"] == 4 * SMALL.segment_bytes
        await stage.rise([key_of(0), key_of(59)])
        assert stage.read(0) is None and stage.read(59) == payload_of(59)
        (said,) = (line for line in caplog.messages if "store.flash_bytes" in line)
        assert f"{full.folder}/segment-" in said and full.reason in said
        stage.log.close()
        assert len(caplog.messages) == 1
        tasks.cancel_scope.cancel()


async def test_a_disk_full_of_the_logs_own_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    try:
        with small_disk(tmp_path / "disk", 4 * SMALL.segment_bytes + (16 << 10)) as full:
            await lives_in(full, caplog)
    except PermissionError:
        name = "test_a_disk_full_of_the_logs_own_files"
        if not passes_in_a_space_of_its_own(tmp_path / "own", name):
            pytest.skip("this user may mount nothing")
