"""Which copies a node takes after erasures: none of what was erased since they were begun, and all
of the rest."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvass.kvstore.index.erasures import MARK_S, MARKS_MAX, Erasures
from store_model import order_of

(BLOCK,) = order_of(0, range(1), put_id="p", session="s", groups=range(1), now_s=0.0).headers
BLOCKS = [msgspec.structs.replace(BLOCK, tenant=tenant) for tenant in ("alice", "bob")]

# What happens: the blocks of one tenant are erased, or what was erased is erased below, too.
events = st.lists(st.sampled_from(["alice", "bob", "settle"]), max_size=12)


@given(events, st.integers(0, 12))
def test_a_copy_is_refused_if_its_blocks_were_erased_since_it_was_begun(
    happens: list[str], begun: int
) -> None:
    erasures = Erasures()
    as_of = settled = 0
    for at, event in enumerate(happens):
        if at == begun:
            as_of, settled = erasures.number, erasures.settled
        if event == "settle":
            erasures.settle()
        else:
            erasures.mark(lambda h, event=event: h.tenant == event, 0.0)  # type: ignore[misc]
    if begun >= len(happens):
        as_of, settled = erasures.number, erasures.settled
    before, since = happens[:begun], happens[begun:]
    last = max((at for at, event in enumerate(before) if event == "settle"), default=-1)
    unsettled = before[last + 1 :] + since
    for block in BLOCKS:
        assert erasures.refuses(block, 1.0, as_of=as_of) is (block.tenant in since)
        assert erasures.refuses(block, 1.0, as_of=settled) is (block.tenant in unsettled)
        assert not erasures.refuses(block, 1.0, as_of=None), "what is put anew is no copy"


def test_what_was_begun_before_all_that_is_remembered_is_refused() -> None:
    erasures = Erasures()
    erasures.mark(lambda header: header.tenant == "alice", 0.0)
    number, bob = erasures.number, BLOCKS[1]
    assert not erasures.refuses(bob, MARK_S, as_of=0), "what is not carried out yet is remembered"
    erasures.settle()
    assert erasures.refuses(bob, MARK_S, as_of=0)
    assert not erasures.refuses(bob, MARK_S, as_of=number)
    for _ in range(MARKS_MAX + 1):
        erasures.mark(lambda header: False, MARK_S)
    assert erasures.refuses(bob, MARK_S, as_of=number)
    assert not erasures.refuses(bob, MARK_S, as_of=number + 1)


def test_what_a_bar_found_wrong_is_copied_from_nobody_for_a_while() -> None:
    erasures = Erasures()
    erasures.mark(lambda header: header.tenant == "alice", 0.0, bars=True)
    alice, bob = BLOCKS
    assert erasures.refuses(alice, MARK_S - 1, as_of=erasures.number)
    assert not erasures.refuses(bob, MARK_S - 1, as_of=erasures.number)
    assert not erasures.refuses(alice, MARK_S, as_of=erasures.number)
    assert erasures.refused == 1
