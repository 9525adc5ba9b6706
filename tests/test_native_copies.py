"""Copies and sums of the compiled library, at every level that this machine runs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from kvass.common.native import library

U64 = ctypes.c_uint64
WORDS = np.ctypeslib.ndpointer(np.uint64, flags="C_CONTIGUOUS")
# Around every edge of the algorithm: stripes of 64, blocks of 1,024, pieces of 128 Ki.
SIZES = [241, 255, 256, 1023, 1024, 1025, 1088, 4096, 190_080, 131_071, 131_072, 131_073, 300_001]


@pytest.fixture(params=library.LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    if request.param not in library.levels():
        pytest.skip(library.missing() or f"this machine has no {request.param}")
    return str(request.param)


def at(level: str, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return library.function_at(name, level, result, *arguments)


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_xxhash_s(level: str, size: int) -> None:
    data = np.frombuffer(os.urandom(3 * size + 7), dtype=np.uint8)
    sums = np.zeros(6, dtype=np.uint64)
    sources = np.array([data.ctypes.data, data.ctypes.data + 7], dtype=np.uint64)
    at(level, "kvass_sum", None, U64, WORDS, U64, U64, WORDS)(2, sources, size, 3, sums)
    expected = [
        xxhash.xxh3_64_intdigest(data[start + i * size : start + (i + 1) * size].data)
        for start in (0, 7)
        for i in range(3)
    ]
    assert sums.tolist() == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1])
def test_copies_are_whole_and_touch_nothing_else(level: str, size: int, shift: int) -> None:
    data = np.frombuffer(os.urandom(2 * size), dtype=np.uint8)
    room = np.full(2 * size + 256, 0xA5, dtype=np.uint8)
    start = -room.ctypes.data % 64 + 64 + shift
    sums = np.zeros(2, dtype=np.uint64)
    targets = np.array([room.ctypes.data + start], dtype=np.uint64)
    sources = np.array([data.ctypes.data], dtype=np.uint64)
    copy = at(level, "kvass_copy_sum", None, U64, WORDS, WORDS, U64, U64, WORDS)
    copy(1, targets, sources, size, 2, sums)
    assert np.array_equal(room[start : start + 2 * size], data)
    assert (room[:start] == 0xA5).all() and (room[start + 2 * size :] == 0xA5).all()
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(data[i : i + size].data) for i in (0, size)]


READ_ARGUMENTS = (ctypes.c_int, U64, WORDS, WORDS, U64, U64, WORDS, ctypes.POINTER(ctypes.c_int))


@pytest.mark.parametrize("size", SIZES)
def test_reads_are_whole(level: str, size: int) -> None:
    data = np.frombuffer(os.urandom(2 * size), dtype=np.uint8)
    room, sums = np.zeros_like(data), np.zeros(2, dtype=np.uint64)
    targets = np.array([room.ctypes.data], dtype=np.uint64)
    sources = np.array([data.ctypes.data], dtype=np.uint64)
    error = ctypes.c_int(-1)
    read = at(level, "kvass_read_sum", U64, *READ_ARGUMENTS)
    assert read(os.getpid(), 1, targets, sources, size, 2, sums, ctypes.byref(error)) == 1
    assert error.value == 0 and np.array_equal(room, data)
    assert sums.tolist() == [xxhash.xxh3_64_intdigest(data[i : i + size].data) for i in (0, size)]


def test_a_read_says_which_ranges_came(level: str) -> None:
    size = 4096
    data, room = np.ones(size, dtype=np.uint8), np.zeros(3 * size, dtype=np.uint8)
    targets = room.ctypes.data + np.arange(3, dtype=np.uint64) * np.uint64(size)
    sources = np.array([data.ctypes.data, 64, data.ctypes.data], dtype=np.uint64)
    error = ctypes.c_int(0)
    read = at(level, "kvass_read_sum", U64, *READ_ARGUMENTS)
    sums = np.zeros(3, dtype=np.uint64)
    assert read(os.getpid(), 3, targets, sources, size, 1, sums, ctypes.byref(error)) == 1
    assert os.strerror(error.value) == "Bad address"
    assert room[:size].all() and not room[2 * size :].any()
