"""Sizes that no log can have: refused, with the settings named and what to do."""

from __future__ import annotations

import re

import pytest

from kvass.common.errors import Invalid
from kvass.kvstore.flash.settings import LogSettings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("flash_bytes", "segment_bytes", "said"),
    [
        (
            10 * MIB, 64 * MIB,
            "store.flash_bytes is 10485760, and holds fewer than 3 files of "
            "store.flash_segment_bytes (67108864): set store.flash_bytes to 201326592 or more, or "
            "store.flash_segment_bytes to 3493888",
        ),
        (1000, 64 * MIB, "set store.flash_bytes to 201326592 or more"),
        (64 * MIB, 10_000_000, "store.flash_segment_bytes is 10000000; expected 16384 to"),
        (64 * MIB, 4096, "store.flash_segment_bytes is 4096; expected 16384 to"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(flash_bytes: int, segment_bytes: int, said: str) -> None:
    with pytest.raises(Invalid, match=re.escape(said)) as refused:
        LogSettings(flash_bytes, segment_bytes, 1)
    advised = re.search(r"store.flash_segment_bytes to (\d+)", str(refused.value))
    if advised:
        LogSettings(flash_bytes, int(advised[1]), 1)
