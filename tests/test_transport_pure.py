"""The pure parts of the transport: slices, the book of loans, the choice of a way."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvass.common.errors import Invalid, Unavailable
from kvass.common.transport import copies as transport_copies
from kvass.common.transport.copies import SLICE_BYTES, SLICE_RANGES, check, joined, slices
from kvass.common.transport.loans import ALIGNMENT, BOUND_S, DRAIN_S, LoanBook
from kvass.common.transport.mover import SPINS, pause_s
from kvass.common.transport.route import choose
from kvass.common.transport.seam import Copies, Region


def copies_of(local: list[int], remote: list[int], sizes: list[int]) -> Copies:
    return Copies(*(np.array(values, dtype=np.uint64) for values in (local, remote, sizes)))


@given(st.lists(st.integers(1, 3 * SLICE_BYTES), max_size=40))
def test_slices_cover_every_byte_once_and_in_order(sizes: list[int]) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pieces = list(slices(copies_of(starts, [start + (1 << 40) for start in starts], sizes)))
    position = 0
    for piece in pieces:
        assert 0 < int(piece.sizes.sum()) <= SLICE_BYTES and len(piece.sizes) <= SLICE_RANGES
        for local, remote, size in zip(piece.local, piece.remote, piece.sizes, strict=True):
            assert int(local) == position and int(remote) == position + (1 << 40)
            position += int(size)
    assert position == sum(sizes)


def test_slices_hold_a_bounded_number_of_ranges() -> None:
    count = 3 * SLICE_RANGES + 1
    many = copies_of(list(range(count)), list(range(count)), [1] * count)
    assert [len(piece.sizes) for piece in slices(many)] == [SLICE_RANGES] * 3 + [1]


@given(
    st.lists(st.tuples(st.integers(1, 9), *[st.sampled_from([0, 0, 0, 5])] * 2), max_size=20),
    st.integers(0, 60),
)
def test_joined_ranges_have_the_same_bytes_and_stay_within_a_region(
    steps: list[tuple[int, int, int]], border: int
) -> None:
    local, remote, sizes = [], [], []
    ends = [0, 1 << 20]
    for size, *gaps in steps:
        starts = [end + gap for end, gap in zip(ends, gaps, strict=True)]
        if starts[0] < border < starts[0] + size:
            starts[0] = border
        local.append(starts[0])
        remote.append(starts[1])
        sizes.append(size)
        ends = [start + size for start in starts]
    given_ranges = copies_of(local, remote, sizes)
    made = joined(given_ranges, [Region(0, border), Region(border, 1 << 10)])
    assert moved(made) == moved(given_ranges)
    rows = list(zip(made.local.tolist(), made.remote.tolist(), made.sizes.tolist(), strict=True))
    for first, size in ((row[0], row[2]) for row in rows):
        assert not first < border < first + size, "from one region into another"
    for one, other in pairwise(rows):
        side_by_side = one[0] + one[2] == other[0] and one[1] + one[2] == other[1]
        assert not side_by_side or other[0] in (0, border), "two that could be one"


def moved(copies: Copies) -> list[tuple[int, int]]:
    """Return where each byte comes from and goes to, in order."""
    columns = (copies.local.tolist(), copies.remote.tolist(), copies.sizes.tolist())
    return [
        (local + at, remote + at)
        for local, remote, size in zip(*columns, strict=True)
        for at in range(size)
    ]


REGIONS = [Region(1 << 20, 1 << 20), Region(1 << 30, 4096)]


@pytest.mark.parametrize(
    ("local", "remote", "sizes"),
    [
        ([1 << 20], [0], [(1 << 20) + 1]),  # over the end
        ([(1 << 20) - 1], [0], [2]),  # before the start
        ([(1 << 30) + 4000], [0], [97]),
        ([1 << 20], [0], [0]),  # nothing
        ([1 << 20], [0, 0], [1]),  # lengths differ
        ([2**64 - 8], [0], [16]),  # the sum wraps round
        ([1 << 20], [2**64 - 8], [16]),
    ],
)
def test_wrong_copies_are_refused(local: list[int], remote: list[int], sizes: list[int]) -> None:
    with pytest.raises(Invalid):
        check(copies_of(local, remote, sizes), REGIONS)


def test_right_copies_are_accepted() -> None:
    check(copies_of([1 << 20, 1 << 30], [5, 6], [1 << 20, 4096]), REGIONS)
    check(copies_of([], [], []), REGIONS)
    with pytest.raises(Invalid, match="uint64"):
        check(Copies(*np.ones((3, 1), dtype=np.float64)), REGIONS)
    too_many = transport_copies.RANGES_MAX + 1
    with pytest.raises(Invalid, match="ranges in one call"):
        check(copies_of([1 << 20] * too_many, [0] * too_many, [1] * too_many), REGIONS)


def test_the_way_to_a_peer() -> None:
    assert choose("auto", same_host=True, refused=False) == "read"
    assert choose("auto", same_host=True, refused=True) == "write"
    assert choose("auto", same_host=False, refused=False) == "write"
    assert choose("tcp", same_host=True, refused=False) == "write"
    assert choose("local", same_host=True, refused=False) == "read"
    for same_host, refused in ((True, True), (False, False)):
        with pytest.raises(Unavailable, match=r"transport\.kind"):
            choose("local", same_host=same_host, refused=refused)


class Loans(RuleBasedStateMachine):
    """The book against a dictionary of who has which bytes, in what state."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LoanBook(16 * ALIGNMENT)
        self.now_s = 0.0
        self.tags = 0
        self.ranges: dict[bytes, tuple[int, int, str]] = {}

    def state(self, *names: str) -> list[bytes]:
        return [tag for tag, (_, _, state) in self.ranges.items() if state in names]

    @rule(size=st.integers(1, 20 * ALIGNMENT))
    def lend(self, size: int) -> None:
        self.tags += 1
        tag = str(self.tags).encode()
        offset = self.book.lend(tag, size, self.now_s)
        if offset is not None:
            assert offset + size <= 16 * ALIGNMENT
            assert all(
                offset + size <= first or end <= offset for first, end, _ in self.ranges.values()
            ), "two owners of one byte"
            self.ranges[tag] = (offset, offset + size, "lent")

    @precondition(lambda self: self.ranges)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        tag = data.draw(st.sampled_from(sorted(self.ranges)))
        first, end, state = self.ranges[tag]
        self.book.landed(tag)
        self.ranges[tag] = (first, end, "landed" if state == "lent" else state)

    @precondition(lambda self: self.ranges)
    @rule(data=st.data(), verb=st.sampled_from(["settle", "abandon"]))
    def end(self, data: st.DataObject, verb: str) -> None:
        tag = data.draw(st.sampled_from(sorted(self.ranges)))
        first, end, state = self.ranges[tag]
        if verb == "settle":
            self.book.settle(tag)
        else:
            self.book.abandon(tag, self.now_s)
        if state in ("lent", "landed") and verb == "abandon":
            self.ranges[tag] = (first, end, "quarantined")
        elif state != "quarantined":
            del self.ranges[tag]

    @rule(verb=st.sampled_from(["settle", "abandon"]))
    def end_what_is_unknown(self, verb: str) -> None:
        before = self.book.counts()
        if verb == "settle":
            self.book.settle(b"unknown")
        else:
            self.book.abandon(b"unknown", self.now_s)
        assert self.book.counts() == before

    @rule(seconds=st.floats(0.0, BOUND_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def rebuild_if_due(self) -> None:
        due_s = self.book.rebuild_due_s()
        assert (due_s is not None) == bool(self.state("quarantined"))
        if due_s is None or self.now_s < due_s:
            return
        assert sorted(self.book.rebuilt()) == sorted(self.state("lent"))
        for tag, (first, end, state) in list(self.ranges.items()):
            if state == "quarantined":
                del self.ranges[tag]
            else:
                self.ranges[tag] = (first, end, "orphaned")

    @invariant()
    def bytes_are_conserved(self) -> None:
        counts = self.book.counts()
        assert counts["free"] + counts["lent"] + counts["quarantined"] == counts["total"]
        assert (counts["quarantined"] > 0) == bool(self.state("quarantined"))
        assert self.book.is_empty() == (not self.state("lent", "quarantined"))
        assert {tag for tag in self.ranges if self.book.is_lent(tag)} == set(self.state("lent"))

    def teardown(self) -> None:
        for tag in list(self.ranges):
            self.book.abandon(tag, self.now_s)
        if self.book.rebuild_due_s() is not None:
            assert self.book.rebuild_due_s() == float("-inf")
            self.book.rebuilt()
        assert self.book.counts()["free"] == self.book.size


TestLoans = Loans.TestCase


def test_a_busy_landing_is_rebuilt_at_the_bound_and_lends_nothing_just_before() -> None:
    book = LoanBook(16 * ALIGNMENT)
    book.lend(b"hung", ALIGNMENT, 0.0)
    book.lend(b"busy", ALIGNMENT, 0.0)
    book.abandon(b"hung", 10.0)
    assert book.rebuild_due_s() == 10.0 + BOUND_S
    assert book.lend(b"next", ALIGNMENT, 10.0 + BOUND_S - DRAIN_S - 0.1) is not None
    assert book.lend(b"late", ALIGNMENT, 10.0 + BOUND_S - DRAIN_S) is None
    book.settle(b"next")
    book.settle(b"busy")
    assert book.rebuild_due_s() == float("-inf"), "no clean loan is out: at once"


def test_a_full_quarantine_is_rebuilt_at_once() -> None:
    book = LoanBook(16 * ALIGNMENT)
    book.lend(b"busy", ALIGNMENT, 0.0)
    book.lend(b"hung", 8 * ALIGNMENT, 0.0)
    book.abandon(b"hung", 0.0)
    assert book.rebuild_due_s() == float("-inf")
    assert book.rebuilt() == [b"busy"]
    assert not book.is_lent(b"busy") and book.counts()["lent"] == ALIGNMENT
    book.abandon(b"busy", 1.0)
    assert book.counts()["free"] == book.size


def test_a_mover_that_waits_for_long_pauses_longer_and_never_for_long() -> None:
    """A transfer that hangs is polled until its deadline: ten thousand times and more."""
    pauses = [pause_s(empty) for empty in (0, SPINS - 1, SPINS, SPINS + 8, 10_000, 10**7)]
    assert pauses == sorted(pauses) and pauses[1] == 0.0 < pauses[2] < pauses[3]
    assert pauses[-1] == pauses[-2] <= 1e-3
