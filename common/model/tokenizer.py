"""Text to token ids and back, and chat messages to prompts. Torch-free.

Everything is read from a model directory's tokenizer.json, tokenizer_config.json and (newer
checkpoints) chat_template.jinja. Templates run in the same sandbox and with the same names as in
`transformers`, so a template written for it renders the same text here. It refuses to know HTTP: a
message that the template cannot take raises `Invalid`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvass.common.errors import Invalid
from kvass.common.model.spec import load_spec, read_json

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """One model's tokenizer. Immutable after loading, so any thread may use it.

    `inner` is the `tokenizers.Tokenizer` itself; `eos_token_ids` are the ids that end a generation.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...],
        chat_template: str | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self.inner = inner
        self.eos_token_ids = eos_token_ids
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self._special = dict(special or {})
        self._template = _compile(chat_template) if chat_template else None
        self._byte_level = '"ByteLevel"' in _component(inner, "decoder")
        self._added = inner.get_added_tokens_decoder()

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Read a model directory; raises Invalid with the file named."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise Invalid(f"{model_dir}: no tokenizer.json (a fast tokenizer is needed)")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise Invalid(f"{path}: {error}") from error
        config_path = model_dir / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        special = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        ends = dict.fromkeys(load_spec(model_dir).eos_token_ids)
        eos = inner.token_to_id(special.get("eos_token", ""))
        if eos is not None:
            ends[eos] = None
        return cls(
            inner,
            eos_token_ids=tuple(ends),
            chat_template=_read_template(model_dir, config),
            special=special,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenise; special tokens spelled out in the text count as such.

        `add_special_tokens`: let the model's post-processor add its BOS, if it has one. A surrogate
        that UTF-8 cannot hold raises Invalid.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Invalid(f"the text is not valid Unicode: {error}") from None
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of token ids; bytes that form no character yet become U+FFFD."""
        return self.inner.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that one token adds to the text (special tokens: their name's).

        Concatenated over ids they are the text's UTF-8, but for a leading space that sentencepiece
        decoders strip. Raises Invalid for an id outside the vocabulary.
        """
        piece = self.inner.id_to_token(token)
        if piece is None:
            raise Invalid(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        if self._byte_level:
            if token in self._added or not _BYTE_OF.keys() >= set(piece):
                return piece.encode()
            return bytes(_BYTE_OF[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves this id out."""
        added = self._added.get(token)
        return added is not None and added.special

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Render messages with the model's template; raises Invalid if it cannot take them."""
        if self._template is None:
            raise Invalid(
                "this model has no chat template: use /v1/completions", parameter="messages"
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise Invalid(
                f"the model's chat template refuses these messages: {error}", parameter="messages"
            ) from None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt's ids; the template itself writes BOS where the model wants one."""
        return self.encode(
            self.chat_text(messages, add_generation_prompt), add_special_tokens=False
        )


def _component(inner: tokenizers.Tokenizer, name: str) -> str:
    part = getattr(inner, name)
    return "" if part is None else part.__getstate__().decode()


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_template(model_dir: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own wins; several named templates: the one called default."""
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}.get("default")
    return template


class _GenerationTag(Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks training text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _compile(source: str) -> Template:
    """Compile as `transformers` does: same sandbox, white space rules, filters and globals."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise Invalid(f"the model's chat template does not compile: {error}") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, inverted: printable bytes stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(rest)
    }


_BYTE_OF = _byte_alphabet()
