"""Addresses and checksums as they travel: 64 bits each, little-endian, packed. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from kvass.common.checksum import Words
from kvass.common.errors import Invalid

WORD_BYTES = 8


def packed(values: Iterable[int]) -> bytes:
    """Return numbers of 64 bits as bytes. (Every machine that this runs on is little-endian.)"""
    return array("Q", values).tobytes()


def unpacked(data: bytes, what: str) -> Words:
    """Return them as uint64 [count], read-only; raises Invalid for what is not whole."""
    if len(data) % WORD_BYTES:
        raise Invalid(f"{what}: {len(data)} bytes; expected a multiple of {WORD_BYTES}")
    return np.frombuffer(data, dtype=np.uint64)
