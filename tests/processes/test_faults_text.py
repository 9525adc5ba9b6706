"""Faults of an answer's text, by HTTP: what is streamed, joined, is what is not streamed, wherever
stop strings and characters are split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster import Answer, Cluster, cluster
from cluster_control import Control

pytestmark = [pytest.mark.process, pytest.mark.model]

AT_ONCE = 8
PROMPT = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,"
# Texts that the model goes on with in kind, in characters of two to four tokens.
SCRIPTS = {
    "emoji": "\N{SLIGHTLY SMILING FACE}\N{FOX FACE}" * 12,
    "joined": "\N{THUMBS UP SIGN}\N{EMOJI MODIFIER FITZPATRICK TYPE-4} " * 10,
    "japanese": "日本語の文章です。" * 6,
    "korean": "한국어 문장 " * 8,
}


@pytest.fixture(scope="module")
def up() -> Iterator[Cluster]:
    with cluster("--max-model-len", "1024", "--store", "1") as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(up: Cluster) -> Iterator[None]:
    yield
    up.until_idle()


def both(up: Cluster, fields: Sequence[dict[str, Any]]) -> list[tuple[Answer, Answer]]:
    """Ask each whole and streamed, several at once."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        whole = [threads.submit(up.ask, **each) for each in fields]
        streamed = [threads.submit(up.stream, **each) for each in fields]
        return [(a.result(), b.result()) for a, b in zip(whole, streamed, strict=True)]


@pytest.mark.fault(number=40)
def test_stop_strings_at_every_split(up: Cluster) -> None:
    """Every place where one can begin, in lengths that end within, at and after a token's end."""
    plain = up.stream(PROMPT, max_tokens=24)
    text = plain.text
    assert len(plain.pieces) > 12 and len(text) > 45
    stops = [text[at : at + size] for at in range(0, 36, 4) for size in (1, 4, 9)]
    asked = [{"prompt": PROMPT, "max_tokens": 24, "stop": stop} for stop in stops]
    for stop, (whole, streamed) in zip(stops, both(up, asked), strict=True):
        assert whole.text == text[: text.index(stop)], stop
        assert streamed.said == whole.said, stop
        assert whole.finish_reason == "stop"


@pytest.mark.fault(number=40)
def test_what_only_begins_like_a_stop_string_is_not_lost(up: Cluster) -> None:
    """It comes as soon as it can be no stop string any more: never later than the answer's end."""
    plain = up.stream(PROMPT, max_tokens=24)
    text = plain.text
    starts = [text[at : at + size] for at in range(0, 30, 6) for size in (2, 7)]
    asked = [
        {"prompt": PROMPT, "max_tokens": 24, "stop": [f"{start}\N{SECTION SIGN}", "never"]}
        for start in starts
    ]
    late = []
    for (whole, streamed), start in zip(both(up, asked), starts, strict=True):
        assert streamed.said == whole.said == plain.said, start
        if max(map(len, streamed.pieces)) > len(start) + max(map(len, plain.pieces)):
            late.append(start)
    assert len(late) <= len(starts) // 2, late  # where all are slow, tokens come together
    end = text[20:25]
    included = up.ask(PROMPT, max_tokens=24, stop=end, include_stop_str_in_output=True)
    assert included.text == text[: text.index(end) + len(end)]


@pytest.mark.fault(number=41)
@pytest.mark.parametrize("script", SCRIPTS)
def test_characters_of_several_tokens_come_whole(up: Cluster, script: str) -> None:
    asked = [{"prompt": SCRIPTS[script], "max_tokens": most} for most in range(7, 15)]
    answers = both(up, asked)
    longest = answers[-1][0].text
    assert sum(not character.isascii() for character in longest) >= 3, longest
    for whole, streamed in answers:
        assert streamed.said == whole.said
        assert "\N{REPLACEMENT CHARACTER}" not in whole.text
        assert longest.startswith(whole.text), "an answer that is cut ends before a character"


@pytest.mark.fault(number=41)
def test_a_prompt_that_ends_in_half_a_character(up: Cluster) -> None:
    """The answer has the character if it completes it, and nothing of the prompt besides."""
    tokenizer = Control(up).tokenizer
    for character in ("\N{FOX FACE}", "語"):
        prompt = tokenizer.encode(f"Hello {character}")
        for kept in (1, 2):
            rest = prompt[-kept:]
            begun = prompt[: len(prompt) - kept]
            force = {str(rest[0]): 100}
            step = up.ask(begun, max_tokens=1, logit_bias=force)
            assert step.text == (character if kept == 1 else ""), character
            assert up.stream(begun, max_tokens=1, logit_bias=force).said == step.said
        (letter,) = tokenizer.encode("A")
        force = {str(letter): 100}
        whole = up.ask(prompt[:-1], max_tokens=3, logit_bias=force)
        assert whole.text == "AAA" == up.stream(prompt[:-1], max_tokens=3, logit_bias=force).text
