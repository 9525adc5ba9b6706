"""Streamed text: however it is cut into tokens, its pieces joined are the text not streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kvass.common.config import DEFAULT_MODEL
from kvass.common.model.fetch import resolve_model
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.wire import Stop
from kvass.decode.stream import Step, TextStream

CORPUS = (
    "The quick brown fox jumps over the lazy dog. Der schnelle Fuchs, größer als fünf Bäume.",
    "naïve café e\u0301le\u0301gant z\u0335a\u0335l\u0335g\u0335o",
    "日本語の文章です。中文句子。한국어 문장",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷 smile 😀😃😄",
    "STOP </s> END ###\n\nUser: hello\nAssistant: abcabcabd",
)
SPECIAL = ("<|end|>", "<|tool|>")


@cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE as GPT-2, Llama 3, Qwen2 and SmolLM have it; its first id ends."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_tokens(["größe"])  # an added token whose name is text, not byte-level code
    return Tokenizer(inner, eos_token_ids=(0,))


@cache
def sentencepiece() -> Tokenizer:
    """A small tokenizer of Llama 2's kind: a space is part of the word, unknown bytes fall back."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(CORPUS[:2]).replace(" ", "")) | {"▁"})
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("l", "l"), ("o", "w"), ("▁", "▁")]
    pieces += letters + ["".join(pair) for pair in merges]
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.add_special_tokens(["<s>", "</s>", "<unk>"])
    return Tokenizer(inner, eos_token_ids=(1,))


@cache
def default_model() -> Tokenizer:
    return Tokenizer.load(resolve_model(DEFAULT_MODEL, progress=False))


@cache
def by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The id of each text token, by its bytes."""
    plain = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]
    return {tokenizer.token_bytes(token): token for token in plain}


def cut_into_tokens(tokenizer: Tokenizer, data: bytes, cuts: Sequence[int]) -> list[int]:
    """Tokens whose bytes are `data`, the longest ones that cross none of the cuts."""
    known, tokens, start = by_bytes(tokenizer), [], 0
    borders = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    for border in borders:
        while start < border:
            end = next(
                e for e in range(min(border, start + 12), start, -1) if data[start:e] in known
            )
            tokens.append(known[data[start:end]])
            start = end
    return tokens


def steps(stream: TextStream, tokens: Sequence[int]) -> Iterator[Step]:
    yield stream.replayed
    for token in tokens:
        step = stream.push(token)
        yield step
        if step.finish_reason:
            return


def run(stream: TextStream, tokens: Sequence[int]) -> tuple[str, str, str | int]:
    """All text, the finish reason and the stop reason."""
    parts = list(steps(stream, tokens))
    return "".join(part.text for part in parts), parts[-1].finish_reason, parts[-1].stop_reason


def cut_at_stop(text: str, strings: Sequence[str], *, included: bool) -> tuple[str, str]:
    """The dumb reference: try every end, then every stop string, the longest first."""
    for end in range(len(text) + 1):
        for string in sorted(strings, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end if included else end - len(string)], string
    return text, ""


alphabet = "ab \n#ßé\u0301日語😀👍🏽\u200d"
texts = st.one_of(
    st.text(alphabet, max_size=40),
    st.lists(st.sampled_from([*CORPUS, "größe", " the low"]), max_size=2).map("".join),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
stop_strings = st.lists(st.text("ab#ß日😀", min_size=1, max_size=5), max_size=4).map(tuple)
cuts = st.lists(st.integers(0, 400), max_size=30)
Make = Callable[[], Tokenizer]
both = pytest.mark.parametrize("make", [byte_level, sentencepiece])
NO_EOS: frozenset[int] = frozenset()
FREE = Stop(max_tokens=10_000)


def held_back(stream: TextStream) -> str:
    """Return what would be text if the answer went on, and did not become a stop string."""
    return "" if stream._is_over else stream._unsent(stream._stops.flush())


@both
@given(texts, stop_strings, cuts, st.booleans())
@settings(max_examples=120, deadline=None)
def test_pieces_joined_are_the_text_up_to_the_first_stop(
    make: Make, text: str, strings: tuple[str, ...], cuts: list[int], included: bool
) -> None:
    tokenizer = make()
    tokens = cut_into_tokens(tokenizer, text.encode(), cuts)
    stop = Stop(max_tokens=10_000, strings=strings, include_stop_string=included)
    stream = TextStream(tokenizer, [by_bytes(tokenizer)[b"a"]], stop, NO_EOS)
    joined, finish_reason, stop_reason = run(stream, tokens)
    expected, matched = cut_at_stop(text, strings, included=included)
    assert joined + held_back(stream) == expected
    assert (finish_reason, stop_reason) == (("stop", matched) if matched else ("", ""))


@both
@given(texts, stop_strings, cuts)
@settings(max_examples=60, deadline=None)
def test_only_what_could_become_a_stop_string_is_held_back(
    make: Make, text: str, strings: tuple[str, ...], cuts: list[int]
) -> None:
    tokenizer = make()
    stream = TextStream(
        tokenizer, [by_bytes(tokenizer)[b"a"]], Stop(max_tokens=10_000, strings=strings), NO_EOS
    )
    data, released = b"", ""
    for token in cut_into_tokens(tokenizer, text.encode(), cuts):
        data += tokenizer.token_bytes(token)
        step = stream.push(token)
        released += step.text
        if step.finish_reason:
            return
        whole = data.decode(errors="ignore")
        held = whole.removeprefix(released)
        assert whole.startswith(released)
        assert not held or any(string.startswith(held) for string in strings)
        longer = [whole[i:] for i in range(len(released))]
        assert not any(string.startswith(tail) for string in strings for tail in longer)


@both
@given(texts, cuts, st.integers(0, 400))
@settings(max_examples=120, deadline=None)
def test_a_prompt_may_end_anywhere_even_within_a_character(
    make: Make, text: str, cuts: list[int], border: int
) -> None:
    """The answer's text is every character that the answer's tokens complete, and nothing else."""
    tokenizer = make()
    data = ("a" + text).encode()
    border = 1 + border % len(data)
    prompt = cut_into_tokens(tokenizer, data[:border], cuts)
    stream = TextStream(tokenizer, prompt, FREE, NO_EOS)
    joined, _, _ = run(stream, cut_into_tokens(tokenizer, data[border:], cuts))
    assert joined == ("a" + text).removeprefix(data[:border].decode(errors="ignore"))


@both
@example([3960, 96])
@given(st.lists(st.integers(0, 10_000), max_size=30))
@settings(max_examples=120, deadline=None)
def test_any_tokens_at_all_give_the_tokenizer_s_own_text(make: Make, numbers: list[int]) -> None:
    """Without a prompt, also for tokens that no text has: special ones, broken characters."""
    tokenizer = make()
    tokens = [number % tokenizer.vocab_size for number in numbers]
    if make is sentencepiece:
        # `tokenizers` turns a whole run of such bytes into U+FFFD if any of it is broken, which
        # nothing that streams can know: no part of characters here.
        tokens = [token for token in tokens if token not in range(3 + 0x80, 3 + 0x100)]
    # `tokenizers` takes the letters of an added token for byte-level code where it can.
    tokens = [token for token in tokens if tokenizer.inner.id_to_token(token) != "größe"]
    joined, _, _ = run(TextStream(tokenizer, [], FREE, NO_EOS), tokens)
    expected = tokenizer.decode(tokens)
    # An answer that ends within a character ends before it. Half a surrogate, which is no character
    # but takes two bytes to be none, is waited for as well.
    assert expected.startswith(joined)
    assert expected[len(joined) :] in ("", "\ufffd", "\ufffd\ufffd")


def test_a_leading_space_is_dropped_at_the_start_of_all_text_only() -> None:
    tokenizer = sentencepiece()
    word = tokenizer.encode("the")
    assert tokenizer.decode(word) == "the"
    bos = 0
    begin = TextStream(tokenizer, [bos], FREE, NO_EOS)
    assert run(begin, word * 2)[0] == "the the"
    two_spaces = tokenizer.inner.token_to_id("▁▁")
    assert two_spaces is not None
    assert TextStream(tokenizer, [bos], FREE, NO_EOS).push(two_spaces).text == " "
    after = TextStream(tokenizer, word, FREE, NO_EOS)
    assert run(after, word)[0] == " the"


@pytest.mark.parametrize("answer", ["x", "\n日", " the"])
def test_half_a_character_that_the_answer_does_not_complete_is_not_repeated(answer: str) -> None:
    tokenizer = byte_level()
    prompt = cut_into_tokens(tokenizer, "a日".encode()[:-1], [])
    stream = TextStream(tokenizer, prompt, FREE, NO_EOS)
    assert run(stream, cut_into_tokens(tokenizer, answer.encode(), []))[0] == answer


@given(texts, stop_strings, cuts, st.integers(0, 60), st.integers(0, 8))
@settings(max_examples=120, deadline=None)
def test_a_resumed_answer_adds_exactly_what_the_client_lacks(
    text: str, strings: tuple[str, ...], cuts: list[int], cut: int, lost: int
) -> None:
    """`lost`: characters that were released but never reached the client."""
    tokenizer = byte_level()
    tokens = cut_into_tokens(tokenizer, text.encode(), cuts)
    stop, prompt = Stop(max_tokens=200, strings=strings), cut_into_tokens(tokenizer, b"a", [])
    whole = list(steps(TextStream(tokenizer, prompt, stop, NO_EOS), tokens))
    cut = min(cut, len(whole) - 1)
    sent = "".join(step.text for step in whole[: cut + 1])
    sent = sent[: max(0, len(sent) - lost)]
    resumed = TextStream(
        tokenizer, prompt, stop, NO_EOS, generated=tokens[:cut], text_sent=len(sent)
    )
    left = [] if resumed.replayed.finish_reason else tokens[cut:]
    joined, finish_reason, stop_reason = run(resumed, left)
    assert sent + joined == "".join(step.text for step in whole)
    assert (finish_reason, stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)
    if not lost:
        again = TextStream(tokenizer, prompt, stop, NO_EOS, generated=tokens[:cut])
        assert again.replayed.text == ""


def ids(text: str) -> list[int]:
    return byte_level().encode(text)


END, TOOL = 0, 1


@pytest.mark.parametrize(
    ("stop", "tokens", "expected"),
    [
        (Stop(max_tokens=9), [*ids("ab"), END], ("ab", "stop", "")),
        (Stop(max_tokens=9, ignore_eos=True), [END, *ids("ab")], ("ab", "", "")),
        (Stop(max_tokens=9, token_ids=(TOOL,)), [*ids("ab"), TOOL], ("ab", "stop", TOOL)),
        (Stop(max_tokens=9, token_ids=(END,)), [*ids("ab"), END], ("ab", "stop", "")),
        (Stop(max_tokens=1), ids("a"), ("a", "length", "")),
        (Stop(max_tokens=1), [END], ("", "stop", "")),
        (Stop(max_tokens=1, strings=("a",)), ids("a"), ("", "stop", "a")),
        (Stop(max_tokens=1, strings=("ab",)), ids("a"), ("a", "length", "")),
        (Stop(max_tokens=9, strings=("ab",)), [*ids("a"), END], ("a", "stop", "")),
        # The first that is complete wins, and of two complete at once the longer.
        (Stop(max_tokens=9, strings=("bc", "abcd")), ids("xabcd"), ("xa", "stop", "bc")),
        (Stop(max_tokens=9, strings=("c", "abc")), ids("xabc"), ("x", "stop", "abc")),
        # Tokens up to min_tokens neither end an answer nor complete a stop string.
        (Stop(max_tokens=9, min_tokens=2), [END, END, *ids("a"), END], ("a", "stop", "")),
        (
            Stop(max_tokens=9, min_tokens=1, strings=("a", "ab")),
            [*ids("a"), *ids("b"), *ids("a")],
            ("", "stop", "ab"),
        ),
        (Stop(max_tokens=9, min_tokens=2, strings=("aa",)), ids("a") * 3, ("a", "stop", "aa")),
        # Half a character at the end is none; ids beyond the vocabulary have no text.
        (Stop(max_tokens=2), cut_into_tokens(byte_level(), b"a\xe6", [1]), ("a", "length", "")),
        (Stop(max_tokens=2), [*ids("a"), 1_000_000], ("a", "length", "")),
    ],
)
def test_ends(stop: Stop, tokens: list[int], expected: tuple[str, str, str]) -> None:
    stream = TextStream(byte_level(), [], stop, frozenset({END}))
    text, finish_reason, stop_reason = run(stream, tokens)
    assert (text + held_back(stream), finish_reason, stop_reason) == expected


def test_a_stop_token_s_own_text_is_shown_only_on_request() -> None:
    (word,) = ids("a")
    for included, text in ((False, ""), (True, "a")):
        stop = Stop(max_tokens=9, token_ids=(word,), include_stop_string=included)
        stream = TextStream(byte_level(), [], stop, frozenset({END}))
        assert stream.push(word) == Step(text, "stop", word)


@pytest.mark.model
@given(texts, stop_strings, cuts)
@settings(max_examples=60, deadline=None)
def test_the_default_model_s_tokenizer(
    text: str, strings: tuple[str, ...], cuts: list[int]
) -> None:
    tokenizer = default_model()
    borders = [0, *sorted(cuts), 400]
    tokens = [
        token for start, end in pairwise(borders) for token in tokenizer.encode(text[start:end])
    ]
    text = tokenizer.decode(tokens)  # its vocabulary lacks some control characters
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    stream = TextStream(tokenizer, prompt, Stop(max_tokens=1_000, strings=strings), NO_EOS)
    joined, _, stop_reason = run(stream, tokens)
    assert (joined + held_back(stream), stop_reason) == cut_at_stop(text, strings, included=False)
