"""Routing: properties of the estimate, the choice, affinity and the count of cached tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.common.errors import Overloaded, Unavailable
from kvass.common.keys import BlockKey, ranges_of
from kvass.gateway import route
from kvass.gateway.route import Affinity, Prompt, Worker

BLOCK = 16

workers = st.builds(
    Worker,
    member_id=st.uuids().map(str),
    start_id=st.uuids().map(str),
    running=st.integers(0, 64),
    waiting=st.integers(0, 8),
    waiting_tokens=st.integers(0, 100_000),
    waiting_max=st.sampled_from([0, 4, 16]),
    prefill_tokens_s=st.floats(10, 1e5),
    pull_bytes_s=st.floats(1e6, 1e10),
)
fleets = st.lists(workers, min_size=1, max_size=5, unique_by=lambda worker: worker.start_id)
index_sets = st.sets(st.integers(0, 40))


def prompt_of(tokens: int, stored: set[int]) -> Prompt:
    return Prompt(tokens, BLOCK, 100_000, ranges_of(sorted(stored)))


@given(fleets, st.lists(workers, max_size=3), st.integers(1, 700), index_sets, st.data())
def test_the_plan_is_the_best_of_what_is_there(
    decodes: list[Worker],
    prefills: list[Worker],
    tokens: int,
    stored: set[int],
    data: st.DataObject,
) -> None:
    local = {each.start_id: data.draw(index_sets) for each in decodes}
    prompt = prompt_of(tokens, stored)
    if all(each.is_full for each in decodes):
        with pytest.raises(Overloaded) as caught:
            route.plan(prompt, decodes, prefills, local=local, prefill_tokens_min=64)
        assert caught.value.retry_after_s >= 1
        return
    planned = route.plan(prompt, decodes, prefills, local=local, prefill_tokens_min=64)
    assert planned.decode in decodes and not planned.decode.is_full
    blocks = tokens // BLOCK
    have = {i for i in local[planned.decode.start_id] | stored if i < blocks}
    assert planned.missing_tokens == max(1, tokens - BLOCK * len(have))
    usable = [each for each in prefills if not each.is_full]
    assert (planned.prefill is not None) == (planned.missing_tokens >= 64 and bool(usable))
    assert planned.prefill is None or planned.prefill in usable
    for other in decodes:
        if not other.is_full:
            alone = route.plan(prompt, [other], prefills, local=local, prefill_tokens_min=64)
            assert planned.estimate_s <= alone.estimate_s
    assert planned == route.plan(
        prompt, decodes[::-1], prefills[::-1], local=local, prefill_tokens_min=64
    )


@given(workers.filter(lambda worker: not worker.is_full), st.integers(1, 700), index_sets)
def test_blocks_in_the_pool_never_make_a_worker_worse(
    worker: Worker, tokens: int, local: set[int]
) -> None:
    prompt = prompt_of(tokens, set())
    cold = route.plan(prompt, [worker], [], local={}, prefill_tokens_min=64)
    warm = route.plan(prompt, [worker], [], local={worker.start_id: local}, prefill_tokens_min=64)
    assert warm.estimate_s <= cold.estimate_s


def test_no_decode_worker_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        route.plan(prompt_of(10, set()), [], [], local={}, prefill_tokens_min=64)


def test_affinity_beats_an_equal_worker_and_yields_to_a_long_queue() -> None:
    cold, warm = Worker("a", "a-s"), Worker("b", "b-s")
    local = {"b-s": set(range(32))}
    prompt = prompt_of(512 + 8, set())
    assert route.plan(prompt, [cold, warm], [], local=local, prefill_tokens_min=64).decode == warm
    busy = Worker("b", "b-s", waiting_tokens=100_000)
    assert route.plan(prompt, [cold, busy], [], local=local, prefill_tokens_min=64).decode == cold


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.lists(st.integers(0, 30), max_size=10))))
def test_affinity_is_bounded_and_remembers_the_latest(
    records: list[tuple[str, list[int]]],
) -> None:
    affinity = Affinity(keys_max=12)
    for start_id, numbers in records:
        keys = [BlockKey(bytes([number])) for number in numbers]
        worker = Worker("w", start_id)
        affinity.record(worker, keys)
        assert len(affinity) <= 12
        assert affinity.blocks(worker, keys[-3:]) == set(range(len(keys[-3:])))
        assert affinity.blocks(Worker("w", "nobody"), keys) == set()
        assert affinity.blocks(Worker("w", start_id, emptied_count=1), keys) == set()


def test_slow_prefill_is_asked_all_the_same() -> None:
    """A rate that was measured under load shuts nobody out where there is no faster one."""
    slow, decode = Worker("p", "p-s", prefill_tokens_s=0.1), Worker("d", "d-s")
    planned = route.plan(prompt_of(64, set()), [decode], [slow], local={}, prefill_tokens_min=64)
    assert planned.prefill == slow


def sent_to_slow(times: float, role: str) -> list[int]:
    """Return when, of prompts that come every ten seconds, one went to the slower of two."""
    fast, slow = Worker("a", "a-s"), Worker("b", "b-s", prefill_tokens_s=1000 / times)
    prompt, sent, last_s = prompt_of(640, set()), [], 0
    for now_s in range(0, 7200, 10):
        pair = [fast, replace(slow, unused_s=max(now_s - last_s - 10.0, 0.0))]
        decodes, prefills = ([fast], pair) if role == "prefill" else (pair, [])
        planned = route.plan(prompt, decodes, prefills, local={}, prefill_tokens_min=64)
        if slow.member_id in (planned.decode.member_id, getattr(planned.prefill, "member_id", "")):
            sent.append(now_s)
            last_s = now_s
    return sent


@given(st.floats(1.1, route.RETRY_MOST - 0.1), st.sampled_from(["prefill", "decode"]))
def test_a_slow_rate_is_measured_again_at_a_bounded_cost(times: float, role: str) -> None:
    """One k times as slow gets a prompt in about k minutes."""
    sent = sent_to_slow(times, role)
    assert sent and sent[0] <= 60 * times + 20
    assert len(sent) <= 7200 / (60 * (times - 1)) + 1


@given(st.floats(route.RETRY_MOST + 0.1, 1000), st.sampled_from(["prefill", "decode"]))
def test_nobody_waits_for_one_that_is_much_slower(times: float, role: str) -> None:
    assert sent_to_slow(times, role) == []


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 3))
def test_more_than_a_pool_holds_is_not_believed_to_be_there(
    length: int, prompts: int, rounds: int
) -> None:
    """Prompts of which one round is more than the pool: when its turn comes again, each is gone."""
    affinity, worker = Affinity(), Worker("w", "s", total_blocks=20)
    chains = [
        [BlockKey(bytes([number, block])) for block in range(length)] for number in range(prompts)
    ]
    fits = length * prompts <= 20
    for _ in range(rounds):
        for chain in chains:
            affinity.record(worker, chain)
            assert affinity.blocks(worker, chain) == set(range(length))
        first = affinity.blocks(worker, chains[0])
        if fits or length * (prompts - 1) >= 20:
            assert first == (set(range(length)) if fits else set())


ranges = st.lists(
    st.tuples(st.integers(-5, 60), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))
)


@given(ranges)
def test_a_union_covers_the_same_positions(given: list[tuple[int, int]]) -> None:
    merged = route.union(given)
    covered = {i for first, stop in given for i in range(first, stop)}
    assert {i for first, stop in merged for i in range(first, stop)} == covered
    assert merged == ranges_of(sorted(covered))


@given(st.integers(1, 100), ranges)
def test_cached_tokens_are_what_was_not_computed(
    tokens: int, computed: list[tuple[int, int]]
) -> None:
    fresh = {i for first, stop in computed for i in range(first, stop)} & set(range(tokens))
    assert route.cached_tokens(tokens, computed) == min(tokens - len(fresh), tokens - 1)


@given(st.integers(1, 200), index_sets)
def test_missing_ranges_are_what_no_stored_block_covers(tokens: int, stored: set[int]) -> None:
    gaps = route.missing_ranges(tokens, BLOCK, ranges_of(sorted(stored)))
    missing = {i for i in range(tokens) if i // BLOCK not in stored}
    assert gaps == ranges_of(sorted(missing))


def test_a_load_that_makes_no_sense_falls_back() -> None:
    load: dict[str, int | float | str] = {
        "running": "many",
        "prefill_tokens_s": -1,
        "pull_bytes_s": 0.0,
        "total_blocks": 7,
    }
    worker = Worker.of_load("w", "s", load)
    assert worker == Worker("w", "s", total_blocks=7)
    assert route.largest_pool_tokens(BLOCK, [worker]) == 7 * BLOCK
    assert route.largest_pool_tokens(BLOCK, [worker, Worker("x", "y")]) is None
