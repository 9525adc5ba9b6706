"""xxh3-64 over head groups: the one checksum that proves that a block's bytes arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray


def sums(
    buffer: memoryview | NDArray[np.uint8], offset: int, group_size: int, groups: int
) -> tuple[int, ...]:
    """Return the checksum of each of `groups` consecutive ranges of `buffer` from `offset` on."""
    view = buffer if isinstance(buffer, memoryview) else buffer.data
    starts = range(offset, offset + groups * group_size, group_size)
    return tuple(xxhash.xxh3_64_intdigest(view[start : start + group_size]) for start in starts)


def rows(flat: Sequence[int], width: int) -> list[tuple[int, ...]]:
    """Cut checksums that travelled as one list into one tuple a block."""
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]
