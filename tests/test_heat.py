"""How many copies a segment earns by being read, and loses again."""

from __future__ import annotations

import random

from kvass.kvstore.node.copies import heat
from kvass.kvstore.node.copies.heat import HALF_LIFE_S, READS_MIN, SEGMENTS_MAX, Heat


def segment(number: int) -> bytes:
    return number.to_bytes(32, "little")


def run(counted: Heat, share: float, reads: int, *, begun_s: float = 0.0, seed: int = 1) -> int:
    """Read segment 0 that often among 200 others, its readers spread as they are told; return the
    copies that it has in the end."""
    chance = random.Random(seed)
    copies = 1
    for number in range(reads):
        now_s = begun_s + number * 0.01
        if chance.random() < share:
            if chance.random() < 1 / copies:  # the others go to the other copies
                copies = counted.read(segment(0), now_s)
        else:
            counted.read(segment(1 + chance.randrange(200)), now_s)
    return copies


def test_a_segment_that_all_read_earns_copies_and_one_among_many_does_not() -> None:
    assert run(Heat(), 0.01, 5000) == 1
    assert run(Heat(), 0.5, 5000) in (2, 4)
    assert run(Heat(), 0.9, 5000) == heat.COPIES_MAX


def test_copies_settle_though_each_takes_reads_away_from_here() -> None:
    counted, seen = Heat(), []
    for begun in range(10):
        seen.append(run(counted, 0.6, 2000, begun_s=begun * 20.0, seed=begun))
    assert len(set(seen[2:])) == 1, seen


def test_a_segment_that_cools_loses_its_copies() -> None:
    counted = Heat()
    assert run(counted, 0.9, 5000) > 1 and counted.hot() == 1
    for number in range(2000):
        counted.read(segment(1 + number % 200), 50.0 + number * 0.05)
    assert counted.read(segment(0), 150.0) == 1 and counted.hot() == 0


def test_a_few_reads_say_nothing() -> None:
    counted = Heat()
    assert {counted.read(segment(0), 0.0) for _ in range(int(READS_MIN) - 1)} == {1}
    assert counted.read(segment(0), 0.0) > 1


def test_memory_is_bounded_and_keeps_what_is_hot() -> None:
    counted = Heat()
    for number in range(3 * SEGMENTS_MAX):
        counted.read(segment(0), 0.0)
        counted.read(segment(number), 0.0)
        assert len(counted._counts) <= SEGMENTS_MAX
    assert counted._counts[segment(0)].reads > SEGMENTS_MAX
    assert abs(counted._total - sum(c.here for c in counted._counts.values())) < 1e-6
    counted.read(segment(1), 100 * HALF_LIFE_S)
    assert len(counted._counts) == 1
