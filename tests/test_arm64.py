"""The library on arm64: every source compiles, and attention and append give the bits of AVX2.

By a cross compiler and an emulator (Debian: `g++-aarch64-linux-gnu`, `qemu-user`), as no machine of
the project is one. It says nothing of speed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvass.common.native import library

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CHECK = Path(__file__).parent / "arm64" / "check.cpp"
SOURCES = [each for each in (library.HERE / "src").glob("*.cpp") if each.name != "attention.cpp"]
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-pthread"]
FLAGS += ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # as in setup.py
FLAGS += ["-DKVASS_LEVEL=portable", '-DKVASS_SOURCES="check"', f"-I{library.HERE / 'src'}"]


def built(compiler: str, option: str, target: Path) -> str:
    subprocess.run([compiler, *FLAGS, option, CHECK, *SOURCES, "-o", target], check=True)
    return str(target)


@pytest.mark.skipif("avx2" not in library.levels(), reason="this machine has no AVX2 to compare")
def test_bits_are_those_of_avx2(tmp_path: Path) -> None:
    for each in ("g++", COMPILER, EMULATOR):
        if shutil.which(each) is None:
            pytest.skip(f"there is no {each}")
    theirs = [EMULATOR, built(COMPILER, "-static", tmp_path / "arm64")]
    ours = [built("g++", "-march=x86-64-v3", tmp_path / "avx2")]
    found, expected = (
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
        for command in (theirs, ours)
    )
    assert len(expected.splitlines()) == 17
    assert found == expected
