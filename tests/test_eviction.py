"""Every policy keeps the seam's promises; the store's own learns what is worth its room."""

from __future__ import annotations

import hashlib
import math
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvass.common.block import BlockHeader
from kvass.kvstore.eviction.ghosts import Ghosts
from kvass.kvstore.eviction.policy import ChainLru, Eviction
from kvass.kvstore.eviction.rates import BINS, CLASSES, ReuseRates, bin_of
from kvass.kvstore.eviction.reuse import GHOSTS_PER_BLOCK, ReuseEviction
from kvass.kvstore.index.extents import Extents
from kvass.kvstore.index.ledger import Ledger
from kvass.kvstore.index.shares import Allotments, Shares

SPACE = b"n" * 32
SIZE = 64
POLICIES: list[Callable[[], Eviction]] = [ChainLru, ReuseEviction]


def key_of(chain: int, index: int) -> bytes:
    return hashlib.blake2b(f"{chain} {index}".encode(), digest_size=32).digest()


def header_of(chain: int, index: int, length: int = SIZE) -> BlockHeader:
    return BlockHeader(
        key=key_of(chain, index),
        parent=key_of(chain, index - 1) if index else SPACE,
        segment_key=key_of(chain, 0),
        index=index,
        namespace=SPACE,
        tenant="",
        writer="w",
        token_count=16,
        length=length,
        checksums=(0,),
    )


# --- the seam's promises --------------------------------------------------------------------------


class PolicyMachine(RuleBasedStateMachine):
    """A policy against sets: what is there, what was offered, what may go now."""

    @initialize(make=st.sampled_from(POLICIES))
    def start(self, make: Callable[[], Eviction]) -> None:
        self.policy = make()
        self.here: dict[bytes, tuple[int, int]] = {}
        self.offered: set[bytes] = set()
        self.locked: set[bytes] = set()

    @rule(chain=st.integers(0, 4), count=st.integers(1, 6))
    def insert(self, chain: int, count: int) -> None:
        for index in range(count):
            header = header_of(chain, index)
            if header.key not in self.here:
                self.policy.insert(header)
                self.here[header.key] = (chain, index)

    @rule(chain=st.integers(0, 5), indices=st.lists(st.integers(0, 6)))
    def touch(self, chain: int, indices: list[int]) -> None:
        self.policy.touch([key_of(chain, index) for index in indices])

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.here)))
        self.policy.offer(key)
        self.offered.add(key)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self._remove(data.draw(st.sampled_from(sorted(self.here))))

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def lock(self, data: st.DataObject) -> None:
        self.locked.add(data.draw(st.sampled_from(sorted(self.here))))

    @rule()
    def unlock(self) -> None:
        self.locked.clear()

    @rule(evict=st.booleans())
    def victim(self, evict: bool) -> None:
        victim = self.policy.victim(self._evictable)
        if victim is None:
            assert not self.offered - self.locked, "what was offered and may go must come"
            self.offered.clear()  # what was not evictable is forgotten
            return
        assert victim in self.offered - self.locked
        self.offered -= self.asked - {victim}
        if evict:
            self._remove(victim)

    def _evictable(self, key: bytes) -> bool:
        assert key in self.here, "a block that is gone came up"
        if key in self.locked:
            self.asked.add(key)
        return key not in self.locked

    def _remove(self, key: bytes) -> None:
        self.policy.remove(key)
        del self.here[key]
        self.offered.discard(key)
        self.locked.discard(key)

    @invariant()
    def nothing_was_asked_yet(self) -> None:
        self.asked: set[bytes] = set()

    def teardown(self) -> None:
        """Everything comes out, once."""
        for key in getattr(self, "here", {}):
            self.policy.offer(key)
        while getattr(self, "here", {}):
            victim = self.policy.victim(self.here.__contains__)
            assert victim is not None
            self._remove(victim)
        if hasattr(self, "policy"):
            assert self.policy.victim(lambda key: True) is None


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=150, stateful_step_count=50)


@pytest.mark.parametrize("make", POLICIES)
def test_the_end_of_a_chain_goes_before_its_start(make: Callable[[], Eviction]) -> None:
    policy = make()
    for index in range(6):
        policy.insert(header_of(0, index))
        policy.offer(key_of(0, index))
    policy.touch([key_of(0, index) for index in range(6)])
    policy.touch([key_of(1, 0)])
    order = []
    while (key := policy.victim(lambda key: True)) is not None:
        order.append(key)
        policy.remove(key)
    assert order == [key_of(0, index) for index in range(5, -1, -1)]


@pytest.mark.parametrize(("make", "most"), [(ChainLru, 1200), (ReuseEviction, 1500)])
def test_memory_is_bounded_by_the_blocks_that_are_here(
    make: Callable[[], Eviction], most: int
) -> None:
    blocks = 500
    tracemalloc.start()
    store = Store(blocks, make())
    sizes = []
    for turn in range(40):
        for chain in range(turn * 50, turn * 50 + 50):
            store.ask(chain, 10)
        for _ in range(50):  # touches alone add nothing either
            store.ask(turn * 50 + 49, 10)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[20:]) < 1.1 * max(sizes[10:20]), "it grows with what has passed"
    # A header, an entry and a slot of the ledger are among them.
    assert sizes[-1] / blocks < most + 2000


# --- what it learns -------------------------------------------------------------------------------


class Store:
    """A ledger of so many blocks, which is asked for chains and takes what it had not."""

    def __init__(self, blocks: int, policy: Eviction) -> None:
        shares = Shares(Allotments(), lambda: policy)
        self._ledger = Ledger(Extents(blocks * SIZE), shares, lambda key: False)

    def hits(self, chain: int, count: int) -> int:
        """Return how many blocks of a chain are here, up to the first that is not."""
        for index in range(count):
            if self._ledger.visible(key_of(chain, index)) is None:
                return index
        return count

    def catch_up(self) -> None:
        """Let the policy hear what happened."""
        self._ledger.shares.catch_up()

    def ask(self, chain: int, count: int) -> int:
        """Ask for a chain, then put what is missing; returns the hits."""
        found = self.hits(chain, count)
        self._ledger.touch([key_of(chain, index) for index in range(found)])
        for index in range(found, count):
            header = header_of(chain, index)
            entry = self._ledger.open(header, 1, math.inf)
            if entry is None:
                break
            self._ledger.publish([entry], [header])
        self._ledger.news.clear()
        return found


def chat(seed: int, requests: int) -> Iterable[tuple[int, int]]:
    """Yield (conversation, blocks): a third of conversations go on, each turn longer, after a
    while; the others are one question. Some few are asked for all the time."""
    rng = random.Random(seed)
    open_: dict[int, list[int]] = {}
    for number in range(requests):
        for chain in open_.pop(number, []):
            turns = chain % 5 + 2
            yield chain, 4 + 2 * turns
            if rng.random() < 0.7:
                open_.setdefault(number + rng.randrange(20, 120), []).append(chain)
        if number % 10 == 0:
            yield 1_000_000 + rng.randrange(10), 6
        yield number, 8
        if rng.random() < 0.33:
            open_.setdefault(number + rng.randrange(20, 120), []).append(number)


def test_on_a_chat_service_it_reuses_much_more_than_lru() -> None:
    hits = {}
    for make in (ChainLru, ReuseEviction):
        store = Store(300, make())
        hits[make] = sum(store.ask(chain, count) for chain, count in chat(1, 4000))
    assert hits[ReuseEviction] > 1.25 * hits[ChainLru], hits


def warmed(make: Callable[[], Eviction]) -> Store:
    """Return a store that has seen ten chains come back, after long and short, and many that did
    not."""
    store, rng = Store(200, make()), random.Random(3)
    for number in range(4000):
        store.ask(rng.randrange(10) if rng.random() < 0.2 else 1000 + number, 10)
    for chain in range(10):
        store.ask(chain, 10)
    return store


def test_a_scan_does_not_flush_what_is_used_again() -> None:
    store = warmed(ReuseEviction)
    for chain in range(50_000, 50_060):  # three times what the store holds
        store.ask(chain, 10)
    assert sum(store.hits(chain, 10) for chain in range(10)) >= 90
    lru = warmed(ChainLru)
    for chain in range(50_000, 50_060):
        lru.ask(chain, 10)
    assert sum(lru.hits(chain, 10) for chain in range(10)) == 0


def test_what_was_hot_goes_in_the_end() -> None:
    store = warmed(ReuseEviction)
    for number in range(3000):
        store.ask(9000 + number % 12, 10)  # others are hot now,
        store.ask(20_000 + number, 5)  # and what is new comes all the time
    assert sum(store.hits(chain, 10) for chain in range(10)) == 0


def test_it_ages_without_touches_too() -> None:
    policy = ReuseEviction()
    for chain in range(3):
        for index in range(50):
            policy.insert(header_of(chain, index))
    for chain in range(3):
        policy.offer(key_of(chain, 49))
    assert policy.victim(lambda key: True) == key_of(0, 49)


def test_dear_blocks_stay_longer() -> None:
    costs = {SIZE: 1.0, 2 * SIZE: 1.0, 4 * SIZE: 16.0}  # to compute again, by size
    policy = ReuseEviction(lambda header: costs[header.length])
    for chain, length in enumerate(costs):
        policy.insert(header_of(chain, 0, length))
        policy.offer(key_of(chain, 0))
    policy.touch([])
    order = []
    while (key := policy.victim(lambda key: True)) is not None:
        order.append(key)
        policy.remove(key)
    assert order == [key_of(1, 0), key_of(0, 0), key_of(2, 0)]  # twice the bytes: half the worth


def test_the_touches_of_one_request_are_one_use() -> None:
    """A request looks its blocks up three times and gets them: it must not pass for four."""
    policy = ReuseEviction()
    store = Store(200, policy)
    for number in range(200):  # the store fills anew every 20 requests of 4 touches
        for _ in range(4):
            store.ask(number, 10)
    store.catch_up()
    assert {block.uses for block in policy._blocks.values()} == {1}
    for other in range(1000, 1010):
        for _ in range(4):
            store.ask(other, 10)
    for _ in range(4):
        assert store.ask(199, 10) == 10
    store.catch_up()
    assert policy._blocks[key_of(199, 0)].uses == 2


def test_it_is_deterministic() -> None:
    runs = []
    for _ in range(2):
        store = Store(100, ReuseEviction())
        runs.append([store.ask(chain, count) for chain, count in chat(2, 1000)])
    assert runs[0] == runs[1]


def test_blocks_that_are_dropped_leave_nothing_in_the_heaps() -> None:
    policy = ReuseEviction()
    for chain in range(2000):
        policy.insert(header_of(chain, 0))
        policy.offer(key_of(chain, 0))
        policy.remove(key_of(chain, 0))
    assert sum(map(len, policy._heaps.values())) <= 65


# --- its parts ------------------------------------------------------------------------------------


def test_ghosts_remember_the_last_of_each_place() -> None:
    ghosts = Ghosts(60)
    assert len(ghosts) == 64
    first, second = b"\1" * 32, b"\1" + b"\2" * 31  # one place, two prints
    assert ghosts.add(first, 3, 17) is None
    assert ghosts.take(second) is None
    assert ghosts.add(second, 15, (1 << 40) - 1) == (3, 17)
    assert ghosts.all() == [(15, (1 << 40) - 1)]
    assert ghosts.take(second) == (15, (1 << 40) - 1)
    assert ghosts.take(second) is None and ghosts.all() == []


def test_ghosts_are_as_many_as_the_blocks_allow() -> None:
    policy = ReuseEviction()
    for chain in range(1000):
        policy.insert(header_of(chain, 0))
    policy.remove(key_of(0, 0))
    assert 1000 * GHOSTS_PER_BLOCK <= len(policy._ghosts) < 2000 * GHOSTS_PER_BLOCK


def learned(rates: ReuseRates, now: int) -> list[list[float]]:
    rates.learn(now)
    return rates.rates


def test_rates_follow_what_came_back() -> None:
    """Class 0 comes back one time in ten, class 1 nine times in ten, both after 100."""
    rates = ReuseRates()
    for now in range(0, 20_000, 100):
        for kind, back in ((0, 10), (1, 90)):
            if now:
                rates.came(kind, now - 100, now, back)
            rates.began(kind, now, 100)
    table = learned(rates, 20_000)
    assert table[1][0] > 4 * table[0][0] > 0
    assert table[0][bin_of(100)] > 10 * table[0][bin_of(5000)], "those that still wait are evidence"
    for row in table:
        assert len(row) == BINS and row == sorted(row, reverse=True)


def test_an_age_that_nobody_has_reached_promises_less() -> None:
    rates = ReuseRates()
    rates.began(0, 0, 1000)
    for now in range(1, 400):
        rates.came(0, 0, now, 1)
    table = learned(rates, 400)
    assert table[0][bin_of(400)] > 4 * table[0][bin_of(4000)] > 0
    assert len(table) == CLASSES


def test_a_long_wait_keeps_the_spans_few() -> None:
    rates = ReuseRates()
    rates.began(0, 0, 1)
    for now in range(0, 1_000_000, 50):
        rates.began(1, now, 2)
        rates.lost(1, now, now, 1)
        rates.learn(now)
    assert sum(map(len, rates._waiting)) < 1200
    rates.came(0, 0, 1_000_000, 1)
    assert sys.getsizeof(rates._waiting[1]) < 1 << 17
