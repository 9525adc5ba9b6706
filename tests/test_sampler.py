"""Sampling against a dumb reference, and what it must not depend on: batch, order, worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvass.common.wire import Sampling, Stop
from kvass.decode import sampler
from kvass.decode.sampler import RowState, sample, uniform

EOS = frozenset({2})
FREE = Stop(max_tokens=100)
VECTORS = {
    (0, 0, 0): "0x1.706ea291bcd30p-3",
    (1, 0, 0): "0x1.882c12b174710p-1",
    (0, 1, 0): "0x1.bba6d2c8ef42dp-1",
    (0, 0, 1): "0x1.10244fdabb2b2p-2",
    (-1, 2, 3): "0x1.2f72b79d4bf64p-2",
    (2**63 - 1, 127, 131071): "0x1.9cbfda522ca6dp-1",
    (-(2**63), 0, 2**40): "0x1.8f35f3a5fcf1dp-1",
}


def row_state(
    sampling: Sampling,
    *,
    stop: Stop = FREE,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> RowState:
    return RowState(sampling, stop, prompt=prompt, eos_token_ids=EOS, generated=generated)


def random_logits(seed: int, rows: int, vocabulary: int, *, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 4
    return torch.round(logits) if ties else logits


def reference_adjust(
    logits: NDArray[np.float64],
    sampling: Sampling,
    stop: Stop,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> list[float]:
    """Bias, bans and penalties by the letter of their documentation, one token at a time."""
    row = [float(value) for value in logits]
    counts = Counter(generated)
    for token in range(len(row)):
        row[token] += sampling.logit_bias.get(token, 0.0)
        stops = token in stop.token_ids or (token in EOS and not stop.ignore_eos)
        if stops and len(generated) < stop.min_tokens:
            row[token] = -math.inf
        if token in prompt or token in counts:
            repetition = sampling.repetition_penalty
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= sampling.frequency_penalty * counts[token]
        row[token] -= sampling.presence_penalty * (counts[token] > 0)
    return row


def reference_kept(row: Sequence[float], sampling: Sampling) -> list[tuple[int, float]]:
    """The tokens that may be drawn with their probabilities, likeliest first."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    weights = [math.exp((row[token] - row[order[0]]) / sampling.temperature) for token in order]
    kept = [pair for pair in zip(order, weights, strict=True) if pair[1] >= sampling.min_p]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    mass = sum(weight for _, weight in kept)
    nucleus: list[tuple[int, float]] = []
    before = 0.0
    for token, weight in kept:
        if nucleus and before >= sampling.top_p * mass:
            break
        nucleus.append((token, weight))
        before += weight
    return [(token, weight / before) for token, weight in nucleus]


def reference_tokens(row: Sequence[float], sampling: Sampling, draw: float) -> set[int]:
    """The token drawn; or a few, where the reference's own rounding decides between them."""
    if sampling.temperature < 1e-5:
        return {max(range(len(row)), key=lambda token: (row[token], -token))}
    tokens = set()
    for error in (-1e-9, 0.0, 1e-9):
        blurred = msgspec.structs.replace(
            sampling,
            top_p=sampling.top_p * (1 + error),
            min_p=min(1.0, sampling.min_p * (1 + error)),
        )
        kept = reference_kept(row, blurred)
        shares = np.cumsum([share for _, share in kept])
        place = int(np.searchsorted(shares, draw + error, side="right"))
        tokens.add(kept[min(place, len(kept) - 1)][0])
    return tokens


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, -1, 1, 5, 70, 10_000]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 127),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.75, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.25, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 2500), st.sampled_from([-100.0, -1.5, 2.5, 100.0])),
)
stops = st.builds(
    Stop,
    max_tokens=st.just(100),
    min_tokens=st.integers(0, 6),
    token_ids=st.lists(st.integers(0, 2500), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)


def test_published_vectors() -> None:
    for counter, value in VECTORS.items():
        assert uniform(*counter).hex() == value


@given(
    samplings,
    stops,
    st.integers(0, 2**31),
    st.sampled_from([3, 40, 1999, 2300]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_every_choice_is_the_reference_s(
    sampling: Sampling, stop: Stop, seed: int, vocabulary: int, ties: bool, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, vocabulary - 1), max_size=6)
    prompt, generated = data.draw(ids), data.draw(ids)
    logits = random_logits(seed, 1, vocabulary, ties=ties)
    expected_row = reference_adjust(logits[0].double().numpy(), sampling, stop, prompt, generated)
    if max(expected_row) == -math.inf:
        return
    draw = uniform(sampling.seed, sampling.choice, len(generated))
    expected = reference_tokens(expected_row, sampling, draw)
    state = row_state(sampling, stop=stop, prompt=prompt, generated=generated)
    (token,) = sample(logits, [state])
    assert token in expected
    assert state.position == len(generated) + 1


@given(samplings, stops, st.integers(0, 2**31), st.lists(st.integers(0, 11)), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_adjusted_logits_are_the_reference_s(
    sampling: Sampling, stop: Stop, seed: int, tokens: list[int], cut: int
) -> None:
    prompt, generated = tokens[:cut], tokens[cut:]
    row = random_logits(seed, 1, 12)[0].numpy()
    expected = reference_adjust(row.astype(np.float64), sampling, stop, prompt, generated)
    once = row_state(sampling, stop=stop, prompt=prompt, generated=generated)
    grown = row_state(sampling, stop=stop, prompt=prompt)
    for token in generated:
        grown.append(token)
    for state in (once, grown):
        adjusted = row.copy()
        state.adjust(adjusted)
        np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)


def test_top_p_keeps_as_few_tokens_as_reach_it() -> None:
    states = [row_state(Sampling(top_p=0.5, seed=seed)) for seed in range(200)]
    assert set(sample(torch.zeros(200, 4), states)) == {0, 1}


# Bounds of a chi-square statistic that a right sampler passes 999 times in 1,000, by its degrees of
# freedom. Seeds are fixed, so these tests either pass or fail.
CHI_SQUARE_999 = {4: 18.47, 9: 27.88, 49: 85.35}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 50),
        (Sampling(temperature=0.7, top_k=10), 10),
        (Sampling(temperature=1.5, top_k=10, top_p=0.5), 5),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling, kept: int) -> None:
    logits = torch.linspace(0, 1.0, 50)[torch.randperm(50, generator=torch.manual_seed(1))]
    expected = reference_kept(logits.tolist(), sampling)
    assert len(expected) == kept
    draws = 20_000
    states = [
        row_state(msgspec.structs.replace(sampling, seed=seed)) for seed in range(draws // 10)
    ]
    counts: Counter[int] = Counter()
    for _ in range(10):
        drawn = sample(logits.repeat(len(states), 1), states)
        counts.update(token for token in drawn if token is not None)
    assert counts.keys() <= {token for token, _ in expected}
    statistic = sum(
        (counts[token] - draws * share) ** 2 / (draws * share) for token, share in expected
    )
    assert statistic < CHI_SQUARE_999[kept - 1]


def test_neighbouring_counters_are_independent() -> None:
    """Pairs of draws at seeds, choices and positions side by side fill the unit square evenly."""
    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        cells: Counter[tuple[int, int]] = Counter()
        for index in range(5_000):
            counter = (index * 7, index % 3, index % 11)
            neighbour = tuple(a + b for a, b in zip(counter, step, strict=True))
            first, second = uniform(*counter), uniform(*neighbour)
            cells[int(first * 5), int(second * 10)] += 1
        statistic = sum((cells[i, j] - 100) ** 2 / 100 for i in range(5) for j in range(10))
        assert statistic < CHI_SQUARE_999[49]


@given(st.lists(samplings, min_size=2, max_size=6), st.integers(0, 2**31), st.randoms())
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_batch(
    requests: list[Sampling], seed: int, random: Random
) -> None:
    logits = random_logits(seed, len(requests), 2300)
    alone = [
        sample(logits[i : i + 1].clone(), [row_state(each)])[0] for i, each in enumerate(requests)
    ]
    order = list(range(len(requests)))
    random.shuffle(order)
    together = sample(logits[order].clone(), [row_state(requests[i]) for i in order])
    assert together == [alone[i] for i in order]


@given(samplings, st.integers(0, 2**31), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_a_resumed_row_goes_on_with_the_same_tokens(
    sampling: Sampling, seed: int, cut: int
) -> None:
    stop, prompt = Stop(max_tokens=20, min_tokens=7), [5, 6, 5]
    steps = random_logits(seed, 20, 60, ties=True)
    whole = row_state(sampling, stop=stop, prompt=prompt)
    tokens = [sample(step[None].clone(), [whole])[0] for step in steps]
    generated = [token for token in tokens[:cut] if token is not None]
    resumed = row_state(sampling, stop=stop, prompt=prompt, generated=generated)
    assert [sample(step[None].clone(), [resumed])[0] for step in steps[cut:]] == tokens[cut:]


def test_answers_to_one_prompt_differ() -> None:
    logits = torch.zeros(8, 1000)
    states = [row_state(Sampling(seed=3, choice=choice)) for choice in range(8)]
    assert len(set(sample(logits, states))) > 4


def test_a_draw_deep_in_a_flat_ranking_is_right() -> None:
    """All logits equal: the ranking is by id, and a draw of u is id floor(u * V)."""
    size = 49_152
    for seed in range(8):
        state = row_state(Sampling(seed=seed))
        assert sample(torch.zeros(1, size), [state]) == [int(uniform(seed, 0, 0) * size)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.6),
        Sampling(top_k=2),
        Sampling(top_k=3, min_p=0.5),
        Sampling(min_p=1.0),
    ],
)
def test_equals_are_ranked_by_id_whatever_the_sign_of_zero(sampling: Sampling) -> None:
    logits = torch.tensor([[-9.0, -0.0, 0.0, -9.0, 0.0, -0.0]])
    kept = [1, 2, 4, 5][: sampling.top_k if sampling.top_k > 0 else None]
    kept = kept[:3] if sampling.top_p < 1 else kept
    for seed in range(20):
        state = row_state(msgspec.structs.replace(sampling, seed=seed))
        expected = kept[int(uniform(seed, 0, 0) * len(kept))]
        assert sample(logits, [state]) == [expected]


@pytest.mark.parametrize("factors", [(1e3, 16.0, 1.0, 0.0), (1.0, 0.0), (0.0,)])
@given(st.integers(0, 2**31), samplings, st.integers(4, 2300), st.sampled_from([0.1, 1.0, 4.0]))
@settings(max_examples=60, deadline=None)
def test_how_much_is_ranked_first_decides_nothing(
    factors: tuple[float, ...], seed: int, sampling: Sampling, vocabulary: int, spread: float
) -> None:
    logits = random_logits(seed, 1, vocabulary) * spread
    expected = sample(logits.clone(), [row_state(sampling)])
    with mock.patch.object(sampler, "TAIL_FACTORS", factors):
        assert sample(logits.clone(), [row_state(sampling)]) == expected


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [7.0, 7.0, 7.0]])
    states = [row_state(Sampling(temperature=0.0)), row_state(Sampling(temperature=1e-6))]
    assert sample(logits, states) == [1, 0]


def test_plain_rows_leave_the_logits_alone() -> None:
    logits = random_logits(0, 2, 100)
    before = logits.clone()
    states = [row_state(Sampling(temperature=0.0)), row_state(Sampling(seed=1))]
    assert all(state.is_plain for state in states)
    sample(logits, states)
    assert torch.equal(logits, before)


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0]])
    state = row_state(
        Sampling(temperature=0.0), stop=Stop(max_tokens=9, min_tokens=2, token_ids=(3, 4_000_000))
    )
    assert [sample(logits.clone(), [state])[0] for _ in range(3)] == [1, 1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_no_numbers_fails_and_the_others_do_not(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 100)
    logits[1, 7] = bad
    states = [row_state(Sampling(temperature=temperature)) for _ in range(2)]
    first, second = sample(logits, states)
    assert first is not None and second is None
    assert [state.position for state in states] == [1, 0]
