"""Limits of control groups bind wherever they stand: here, above, and in either version."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest

from kvass.common import control_groups
from kvass.common.control_groups import View

GIB = 1 << 30
UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 says of no limit


def view(folder: Path, own: str, files: Mapping[str, object]) -> View:
    """Return a machine of 64 GiB, of which 32 are to be had."""
    found = View(folder / "proc", folder / "groups")
    (found.proc / "self").mkdir(parents=True)
    (found.proc / "self/cgroup").write_text(own)
    (found.proc / "meminfo").write_text(
        f"MemTotal:       {64 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {32 << 20} kB\n"
        "HugePages_Total: 0\n"
    )
    for name, text in files.items():
        file = found.groups / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return found


@pytest.mark.parametrize(
    ("own", "files", "total", "available"),
    [
        ("", {}, 64, 32),
        ("0::/\n", {}, 64, 32),
        ("0::/\n", {"memory.max": 8 * GIB, "memory.current": 2 * GIB}, 8, 6),
        ("0::/\n", {"memory.max": "max", "memory.current": 2 * GIB}, 64, 32),
        (  # its own group has no limit, one above has
            "0::/a.slice/b.scope\n",
            {
                "a.slice/memory.max": 8 * GIB,
                "a.slice/memory.current": 3 * GIB,
                "a.slice/b.scope/memory.max": "max",
                "a.slice/b.scope/memory.current": GIB,
            },
            *(8, 5),
        ),
        (  # the nearest is not the tightest in what it has left
            "0::/a/b\n",
            {
                "a/memory.max": 8 * GIB,
                "a/memory.current": 7 * GIB,
                "a/b/memory.max": 4 * GIB,
                "a/b/memory.current": GIB,
            },
            *(4, 1),
        ),
        (
            "0::/a\n",
            {
                "a/memory.max": 8 * GIB,
                "a/memory.current": 7 * GIB,
                "a/memory.stat": f"anon {GIB}\nfile {6 * GIB}\ninactive_file {4 * GIB}",
            },
            *(8, 5),
        ),
        ("0::/a\n", {"a/memory.max": GIB, "a/memory.current": 2 * GIB}, 1, 0),
        (
            "5:cpu,cpuacct:/x\n4:memory:/docker/c\n0::/\n",
            {
                "memory/memory.limit_in_bytes": UNLIMITED,
                "memory/memory.usage_in_bytes": 40 * GIB,
                "memory/docker/memory.limit_in_bytes": UNLIMITED,
                "memory/docker/c/memory.limit_in_bytes": 8 * GIB,
                "memory/docker/c/memory.usage_in_bytes": 4 * GIB,
                "memory/docker/c/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            },
            *(8, 5),
        ),
        (  # a container that sees its group as the root, and is told the machine's name of it
            "4:memory:/docker/c\n",
            {"memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB},
            *(2, 1),
        ),
        ("0::/kubepods/c\n", {"memory.max": 2 * GIB, "memory.current": GIB}, 2, 1),
        ("0::/../c\n", {"memory.max": 2 * GIB, "memory.current": GIB}, 2, 1),
        ("4:memory:/c\n0::/c\n", {"unified/c/memory.max": GIB, "x": 0}, 1, 32),
    ],
)
def test_the_tightest_memory_limit_counts(
    own: str, files: Mapping[str, object], total: int, available: int, tmp_path: Path
) -> None:
    seen = view(tmp_path, own, files)
    assert control_groups.total_bytes(seen) == total * GIB
    assert control_groups.available_bytes(seen) == available * GIB


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {}, inf),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        (
            "5:cpu,cpuacct:/c\n",
            {"cpu,cpuacct/c/cpu.cfs_quota_us": 200000, "cpu,cpuacct/c/cpu.cfs_period_us": 100000},
            2.0,
        ),
        ("5:cpu:/c\n", {"cpu/c/cpu.cfs_quota_us": -1, "cpu/c/cpu.cfs_period_us": 100000}, inf),
        ("5:cpu:/c\n", {"cpu/cpu.cfs_quota_us": 300000, "cpu/cpu.cfs_period_us": 100000}, 3.0),
    ],
)
def test_the_tightest_quota_counts(
    own: str, files: Mapping[str, object], cores: float, tmp_path: Path
) -> None:
    assert control_groups.cores(view(tmp_path, own, files)) == cores


def test_this_machine_is_read() -> None:
    assert 0 < control_groups.available_bytes() <= control_groups.total_bytes()
    assert control_groups.cores() > 0
