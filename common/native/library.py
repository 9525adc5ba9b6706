"""The compiled library: found, checked, and its functions by name.

`function` returns one compiled for the best instructions that this machine has. Where there is no
library (a build without a C++ compiler) it returns None and its caller has another way; `missing`
says why, once. Calls are made without the interpreter lock; who calls keeps the memory that it
hands over, and no function keeps any.

It refuses to know what the functions do: their modules declare the arguments.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kvass.common.errors import Invalid

_log = logging.getLogger(__name__)

HERE = Path(__file__).parent
# What a machine of one level also runs, the best first. arm64 has `portable` only.
LEVELS = ("avx512bf16", "avx512", "avx2", "portable")
# A level to use instead of the machine's best, or `none`: for tests, and for whoever doubts one.
LEVEL_VARIABLE = "KVASS_NATIVE_LEVEL"


def in_use() -> str:
    """Say what is used, for logs and status: a level, or why none; raises Invalid for a level that
    this machine has not. Call it when a process starts, or its first transfer would find out."""
    if os.environ.get(LEVEL_VARIABLE) == "none":
        return f"none ({LEVEL_VARIABLE} says so)"
    return level() or "none (not built, or not for this tree)"


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
    """Return a function of the library at this process's level; None without a library."""
    chosen = level()
    return None if chosen is None else function_at(name, chosen, result, *arguments)


def function_at(name: str, at_level: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of the library at a level that this machine runs."""
    loaded = _library()
    assert loaded is not None
    found = loaded[f"{name}_{at_level}"]  # its own: an attribute's types are every caller's
    found.restype, found.argtypes = result, arguments
    return found


def check_sizes(name: str, at_level: str, *structures: type[ctypes.Structure]) -> None:
    """Compare structures with the library's own; `name` is the function that writes its sizes.

    A field too many or too few would have it read and write what is not there.
    """
    sizes = (ctypes.c_int64 * len(structures))()
    function_at(name, at_level, None, ctypes.c_void_p)(ctypes.addressof(sizes))
    for structure, size in zip(structures, sizes, strict=True):
        ours = ctypes.sizeof(structure)
        assert ours == size, f"{structure.__name__} has {ours} bytes here, {size} in the library"


@functools.cache
def level() -> str | None:
    """Return the level of instructions in use; None without a library."""
    available = levels()
    wanted = os.environ.get(LEVEL_VARIABLE)
    if wanted == "none":
        return None
    if wanted and wanted not in available:
        raise Invalid(
            f"{LEVEL_VARIABLE} is {wanted!r}; on this machine it may be "
            + ", ".join([*available, "none"])
        )
    return wanted or (available[0] if available else None)


@functools.cache
def levels() -> tuple[str, ...]:
    """Return the levels that this machine runs, the best first; none without a library."""
    loaded = _library()
    if loaded is None:
        return ()
    loaded.kvass_level.restype = ctypes.c_char_p
    return LEVELS[LEVELS.index(loaded.kvass_level().decode()) :]


@functools.cache
def missing() -> str:
    """Say why there is no library; empty when there is one."""
    path = HERE / "libkvass.so"
    if not path.exists():
        return (
            "Kvass was installed without its compiled library: there was no C++ compiler, or one "
            "older than GCC 12 (what pip said tells which). Install g++, then `make up` builds it"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        return f"Kvass's compiled library cannot be loaded ({error})"
    loaded.kvass_sources.restype = ctypes.c_char_p
    expected = _sources_digest()
    if expected is not None and loaded.kvass_sources().decode() != expected:
        return f"{path} was built from other sources: `make up` builds it anew"
    return ""


@functools.cache
def _library() -> ctypes.CDLL | None:
    why = missing()
    if why:
        _log.warning("%s. Until then everything works, more slowly", why)
        return None
    return ctypes.CDLL(str(HERE / "libkvass.so"))


def _sources_digest() -> str | None:
    """Name the sources beside this file as setup.py does; None where they are not installed."""
    sources, recipe = HERE / "src", HERE.resolve().parent.parent / "setup.py"
    if not sources.exists() or not recipe.exists():
        return None
    digest = blake2b(digest_size=16)
    for path in [*sorted(sources.iterdir()), recipe]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
