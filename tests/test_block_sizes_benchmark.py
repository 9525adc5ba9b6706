"""The block size benchmark: what a trace says of reuse, and what it cannot say."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import block_sizes
from block_sizes import Reuse, reuse, shared
from rig_trace import Prompt, prompts_of


@st.composite
def traces(draw: st.DrawFn) -> list[Prompt]:
    """Prompts that begin as earlier ones do: a piece's name stands for all up to its end."""
    names: dict[tuple[int, ...], int] = {}
    prompts: list[Prompt] = []
    texts: list[tuple[int, ...]] = []
    for number in range(draw(st.integers(1, 8))):
        begins = draw(st.sampled_from([(), *texts]))
        kept = draw(st.integers(0, len(begins)))
        added = draw(st.integers(0, 3))
        text = (*begins[:kept], *(1000 * number + each for each in range(added)))
        ends_within = draw(st.integers(1, 511))
        whole = [names.setdefault(text[: stop + 1], len(names)) for stop in range(len(text))]
        last = names.setdefault((*text, -ends_within - 600 * draw(st.integers(0, 2))), len(names))
        tokens = 512 * len(text) + ends_within
        prompts.append(Prompt(tokens, draw(st.integers(1, 1500)), (*whole, last)))
        texts.append(text)
    return prompts


@given(traces())
def test_bounds_hold_and_larger_blocks_never_reuse_more(prompts: list[Prompt]) -> None:
    found = shared(prompts)
    for prompt, (least, most) in zip(prompts, found, strict=True):
        assert 0 <= least <= most <= prompt.tokens
    made = [reuse(prompts, found, size) for size in (16, 32, 64, 512)]
    for smaller, larger in pairwise(made):
        assert larger.least <= smaller.least and larger.most <= smaller.most
        assert larger.lost >= smaller.lost
    assert all(0 <= each.least <= each.most <= 1 - each.lost + 1e-9 for each in made)


def test_a_conversation_that_may_go_on() -> None:
    first = Prompt(1100, 500, (0, 1, 2))  # two whole pieces and 76 tokens, then an answer
    again = Prompt(1100, 500, (0, 1, 2))  # the same to its end: the last token is computed anew
    longer = Prompt(1650, 10, (0, 1, 3, 4))  # begins with both whole pieces: may go on at 1,600
    shorter = Prompt(1590, 10, (0, 1, 5, 6))  # too short for that: goes on after nothing
    other = Prompt(600, 10, (7, 8))
    found = shared([first, again, longer, shorter, other])
    assert found == [(0, 0), (1100, 1100), (1024, 1600), (1024, 1024), (0, 0)]
    total = 1100 + 1100 + 1650 + 1590 + 600
    ours = reuse([first, again, longer, shorter, other], found, 64)
    assert ours.least == (1088 + 1024 + 1024) / total
    assert ours.most == (1088 + 1600 + 1024) / total
    assert ours.lost == (12 + 12 + 50 + 54 + 24) / total
    exact = Reuse(least=0.0, most=0.0, lost=0.0)
    assert reuse([Prompt(64, 1, (9,))], [(0, 0)], 64) == exact


def test_an_equal_prompt_that_fills_its_blocks_leaves_its_last_token_to_compute() -> None:
    prompt = Prompt(1024, 1, (0, 1))
    found = shared([prompt, prompt])
    assert reuse([prompt, prompt], found, 64).least == (1024 - 64) / 2048


def test_the_index_holds_fewer_blocks_of_more_tokens() -> None:
    sizes = [block_sizes.index_bytes(size, tokens=20_000) for size in (16, 32, 64)]
    assert sizes[0] > 1.8 * sizes[1] > 1.8 * 1.8 * sizes[2]


def test_without_the_trace_it_says_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["block_sizes.py", "--trace", "/nowhere"])
    assert block_sizes.main() == 2
    assert "kvcache-ai/Mooncake" in capsys.readouterr().err


def test_a_trace_is_read(tmp_path: Path) -> None:
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}\n'
    (tmp_path / "trace").write_text(line * 2)
    assert list(prompts_of(tmp_path / "trace")) == [Prompt(700, 5, (4, 9), 1.5)] * 2
    assert len(list(prompts_of(tmp_path / "trace", 1))) == 1
