"""The compiled library: what is said where there is none, and that everything works without it."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvass.common.errors import Invalid
from kvass.common.kernels import native_paged
from kvass.common.native import library


def test_the_library_is_built() -> None:
    assert library.missing() == ""
    assert library.level() in library.LEVELS


def test_a_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LEVEL_VARIABLE, "avx1024")
    library.level.cache_clear()
    try:
        with pytest.raises(Invalid, match="'avx1024'"):
            library.level()
    finally:
        library.level.cache_clear()


def test_a_structure_of_another_size_is_found() -> None:
    class Other(ctypes.Structure):
        _fields_ = [("data", ctypes.c_void_p)]

    at_level = library.level()
    if at_level is None:
        pytest.skip(library.missing() or "switched off")
    ours = native_paged._Pool, native_paged._Step, native_paged._Rows, native_paged._Turn
    library.check_sizes("kvass_attention_sizes", at_level, *ours)
    with pytest.raises(AssertionError, match="Other has 8 bytes here, 24 in the library"):
        library.check_sizes("kvass_attention_sizes", at_level, *ours[:2], Other, ours[3])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no C\\+\\+ compiler, or one older than GCC 12"),
        (b"not a library", "cannot be loaded"),
    ],
)
def test_what_is_missing_is_said(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "libkvass.so").write_bytes(content)
    monkeypatch.setattr(library, "HERE", tmp_path)
    assert re.search(said, library.missing.__wrapped__())


def test_a_library_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions might take other arguments."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "setup.py").write_text("changed")
    here = tmp_path / "a" / "b"
    (here / "libkvass.so").symlink_to(library.HERE / "libkvass.so")
    (here / "src").symlink_to(library.HERE.resolve() / "src")
    monkeypatch.setattr(library, "HERE", here)
    assert "was built from other sources: `make up` builds it anew" in library.missing.__wrapped__()


@pytest.mark.parametrize("setting", ["none", *library.levels()])
def test_sums_are_the_same_at_every_level_and_without_the_library(setting: str) -> None:
    code = (
        "import numpy as np; from kvass.common import checksum\n"
        "data = np.arange(4096, dtype=np.uint16).view(np.uint8)\n"
        "print(*checksum.sums(data, 0, 1024, 8), *checksum.sums(data, 0, 64, 2))\n"
        "into, target = checksum.Sums.of(2, 2), np.zeros_like(data)\n"
        "at = [np.array([a.ctypes.data, a.ctypes.data + 4096], dtype=np.uint64)"
        " for a in (target, data)]\n"
        "checksum.copy_ranges(*at, 4096, into, 0, 2)\n"
        "print(*into.values.flat, (target == data).all(), into.whole.all())\n"
        "print(*checksum.sum_ranges(at[0].tolist(), 2048, 2).flat)\n"
    )

    def run(level: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {library.LEVEL_VARIABLE: level},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    found = run(setting)
    assert "True True" in found
    assert found == run("portable")
