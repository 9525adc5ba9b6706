"""Another process's memory, read and written from outside, as broken hardware would.

Linux, same user (or root). It knows addresses and nothing of what lies there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
PIECE = 64 << 20  # bytes read at once while searching


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read(pid: int, address: int, size: int) -> bytes:
    """Return bytes of a process; raises OSError when they cannot be read."""
    buffer = ctypes.create_string_buffer(size)
    moved = _move(_LIBC.process_vm_readv, pid, address, buffer, size)
    return buffer.raw[:moved]


def write(pid: int, address: int, data: bytes) -> None:
    """Put bytes into a process's memory."""
    buffer = ctypes.create_string_buffer(data, len(data))
    moved = _move(_LIBC.process_vm_writev, pid, address, buffer, len(data))
    assert moved == len(data)


def flip(pid: int, address: int) -> None:
    """Change one byte, so that a second call restores it."""
    (byte,) = read(pid, address, 1)
    write(pid, address, bytes([byte ^ 0xFF]))


def find(pid: int, wanted: bytes) -> list[int]:
    """Return where a process has these bytes in memory that it took for itself in bulk."""
    return [place for low, high in _bulk(pid) for place in _find_in(pid, low, high, wanted)]


def _find_in(pid: int, low: int, high: int, wanted: bytes) -> Iterator[int]:
    for start in range(low, high, PIECE):
        piece = read(pid, start, min(PIECE + len(wanted) - 1, high - start))
        at = piece.find(wanted)
        while at >= 0:
            yield start + at
            at = piece.find(wanted, at + 1)


def _bulk(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the mappings of 1 MiB or more that may be written: anonymous ones, shared pages."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split()
        low, high = (int(each, 16) for each in fields[0].split("-"))
        is_own = len(fields) == 5 or fields[5].startswith("/memfd:kvass")
        if is_own and fields[1].startswith("rw") and high - low >= 1 << 20:
            yield low, high


def _move(call: Callable[..., int], pid: int, address: int, buffer: object, size: int) -> int:
    here = _Range(ctypes.cast(buffer, ctypes.c_void_p), size)  # type: ignore[arg-type]
    there = _Range(address, size)
    moved = call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if moved < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return moved
