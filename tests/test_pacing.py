"""Lines that may come by the thousand: the first at once, then one now and then."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_model import block_of, key_of, open_log, read
from kvass.common.pacing import EVERY_S, Pacing
from memory_disk import MemoryDisk


@given(st.lists(st.floats(0, 3 * EVERY_S), min_size=1, max_size=50))
def test_each_line_is_written_or_counted_in_a_later_one(waits: list[float]) -> None:
    pacing = Pacing()
    now_s, written, left_out = 0.0, [], 0
    for wait_s in waits:
        now_s += wait_s
        more = pacing.more(now_s)
        if more is None:
            left_out += 1
        else:
            assert more == (f" ({left_out} more since the last line)" if left_out else "")
            left_out = 0
            written.append(now_s)
    assert written[0] == waits[0], "the first at once"
    assert all(b - a >= EVERY_S for a, b in itertools.pairwise(written))
    assert now_s - written[-1] < EVERY_S


def test_a_flash_that_is_bad_all_over_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = MemoryDisk()
    log = open_log(disk)
    log.append(block_of(number) for number in range(12))
    log.flush()
    for content in disk.files.values():
        content.data[:] = bytes(len(content.data))
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for number in range(12):
        now_s += EVERY_S * (number == 11)
        assert read(log, number) is None
    first, second = (each for each in caplog.messages if "is corrupt" in each)
    assert key_of(0).hex() in first and "the last line" not in first
    assert key_of(11).hex() in second and "(10 more since the last line)" in second
    assert log.catalog.counts["corrupt"] == 12
