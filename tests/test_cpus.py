"""Which cores a process may use, and how many threads that is worth."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvass.common import cpus
from kvass.common.control_groups import View
from kvass.common.errors import Invalid


@pytest.mark.parametrize(
    ("text", "cores"),
    [("3", {3}), ("0-2", {0, 1, 2}), ("0-1, 8,10-11", {0, 1, 8, 10, 11}), ("5-5", {5})],
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert cpus.parse(text, "decode.cpus") == cores
    assert cpus.parse(cpus.ranges_of(cores), "decode.cpus") == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0,,1", "0-99999999", "1.5", "²"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"decode\.cpus is "):
        cpus.parse(text, "decode.cpus")


def test_pinning_is_inherited_and_says_what_there_is() -> None:
    """In a process of its own: it changes the process."""
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    code = (
        "import os, threading; from kvass.common import cpus\n"
        f"cpus.pin('{first}', 'store.cpus')\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join()\n"
        "print(seen[0], cpus.usable())\n"
        "try: cpus.pin('60000', 'store.cpus')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    pinned, refused = done.stdout.splitlines()
    assert pinned == f"{{{first}}} 1"
    assert refused.startswith(f"store.cpus is '60000'; this process may use only {first} ")


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 64), ("150000 100000", 2), ("5000 100000", 1), ("9900000 100000", 64)],
)
def test_a_container_s_quota_counts(
    quota: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 threads in a container with time for two would stand still most of the time."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert cpus.usable(View(tmp_path, tmp_path)) == threads
