"""The default model's tokenizer against an independent one, and chat templates against misuse."""

from __future__ import annotations

import json
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers

from kvass.common.config import DEFAULT_MODEL
from kvass.common.errors import Invalid
from kvass.common.model.fetch import resolve_model
from kvass.common.model.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "",
    "The capital of France is Paris.",
    "In 1984, 3.14159 and 1,234,567 were 100% of 007's numbers: x2=42, ½ ² ٣٤ Ⅷ.",
    "  leading, trailing and   inner\t\twhite\n\n\n  space \r\n",
    "I'll we've they'd DON'T it's 'quoted' isn't",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 ☕️ and 🤖🤖",
    "中文分词没有空格。日本語も同じ、한국어는 다르다.",
    "naïve Ünïcödé — “quotes” … e\u0301 combining; Привет, κόσμε! שלום عربى हिन्दी",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}  # comment\n",
    "<|im_start|>user\nhi 12<|im_end|>\n<|endoftext|>",
    "almost <|im_start |> special <|im_end",
    "\u00a0nbsp\u2003em space\u200bzero width",
]
GPT2_SPLIT = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return resolve_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


class PlainBpe:
    """Byte-level BPE by definition, reading only vocabulary and merges from tokenizer.json."""

    def __init__(self, path: Path) -> None:
        tree = json.loads(path.read_text())
        self.vocab: dict[str, int] = tree["model"]["vocab"]
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(tree["model"]["merges"])}
        self.special = {token["content"]: token["id"] for token in tree["added_tokens"]}
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = (chr(256 + place) for place in range(256))
        self.letters = [chr(byte) if byte in printable else next(others) for byte in range(256)]

    def encode(self, text: str) -> list[int]:
        names = "|".join(map(regex.escape, sorted(self.special, key=len, reverse=True)))
        ids: list[int] = []
        for part in regex.split(f"({names})", text):
            if part in self.special:
                ids.append(self.special[part])
                continue
            for piece in regex.findall(r"\p{N}|\P{N}+", part):  # each digit alone …
                for word in GPT2_SPLIT.findall(piece):  # … then GPT-2's split
                    ids.extend(self._merge([self.letters[byte] for byte in word.encode()]))
        return ids

    def _merge(self, parts: list[str]) -> list[int]:
        parts = [part for part in parts if part in self.vocab]
        while True:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)), default=None)
            if best is None or best not in self.ranks:
                return [self.vocab[part] for part in parts]
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]


def test_it_agrees_with_byte_level_bpe_by_definition(directory: Path, tokenizer: Tokenizer) -> None:
    reference = PlainBpe(directory / "tokenizer.json")
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text), text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("year 2024")
    assert [tokenizer.decode([index]) for index in ids] == ["year", " ", "2", "0", "2", "4"]


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [1, *tokenizer.encode("a"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("a"), 2]) == "a"
    assert tokenizer.is_special(2) and not tokenizer.is_special(100)
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    with pytest.raises(Invalid, match="outside the vocabulary"):
        tokenizer.token_bytes(49152)


def test_a_lone_surrogate_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(Invalid, match="not valid Unicode"):
        tokenizer.encode("half a pair: \ud83d")


CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2+2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c <|im_end|>"},
    ],
]


def test_chats_render_as_in_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    for chat in CHATS:
        for prompt in (True, False):
            text = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            ids = reference.apply_chat_template(
                chat, add_generation_prompt=prompt, return_dict=False
            )
            assert tokenizer.chat_text(chat, prompt) == text
            assert tokenizer.render_chat(chat, prompt) == ids


def test_the_template_adds_its_own_system_message(tokenizer: Tokenizer) -> None:
    assert tokenizer.chat_text(CHATS[0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user"}],
        [{"content": "hi"}],
        ["hi"],
        [7],
    ],
)
def test_messages_that_a_template_cannot_take_are_the_clients_fault(
    tokenizer: Tokenizer, messages: Any
) -> None:
    with pytest.raises(Invalid) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.parameter == "messages"


def with_template(source: str | None) -> Tokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    return Tokenizer(
        inner, eos_token_ids=(), chat_template=source, special={"bos_token": "<s>"}
    )  # fmt: skip


def test_what_templates_may_use() -> None:
    source = """{%- generation %}{% for message in messages %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{- bos_token }}{{ message | tojson }}
    {% endfor %}{% endgeneration %}{{ strftime_now('%Y') }}{% if tools is none %}!{% endif %}"""
    text = with_template(source).chat_text([{"role": "é<"}, {"role": "stop"}])
    assert text == '<s>{"role": "é<"}\n' + f"{datetime.now():%Y}!"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ 1 // 0 }}", "refuses these messages"),
        (None, "no chat template"),
    ],
)
def test_templates_that_refuse_or_misbehave(source: str | None, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        with_template(source).chat_text([{"role": "user", "content": "a"}])


def test_a_template_that_does_not_compile_is_refused_at_load() -> None:
    with pytest.raises(Invalid, match="does not compile"):
        with_template("{% if %}")
