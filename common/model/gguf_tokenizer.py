"""Build tokenizer.json and tokenizer_config.json from a GGUF file's metadata. Torch-free.

A GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the meaning to the reader. `smollm`
means: each digit alone, then GPT-2's byte-level split. Others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from kvass.common.errors import Invalid

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
_SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(field: Callable[[str], Any]) -> Tokenizer:
    """Build the fast tokenizer; `field` returns a metadata value by name, or None."""
    model, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if model is None:
        raise Invalid("GGUF: it has no tokenizer (tokenizer.ggml.model): convert the model anew")
    if (model, pre) != ("gpt2", "smollm"):
        raise Invalid(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not supported; supported: "
            "'gpt2' with 'smollm'. The model's own directory (safetensors, tokenizer.json) is taken"
        )
    tokens: list[str] = _list(field, "tokens", str)
    kinds: list[int] = _list(field, "token_type", int)
    if len(kinds) != len(tokens):
        raise Invalid(f"GGUF tokenizer: {len(tokens)} tokens, and types of {len(kinds)}")
    merges = [_pair(merge) for merge in _list(field, "merges", str)]
    vocab = {token: index for index, token in enumerate(tokens)}
    # No unknown token, as in the model's own tokenizer: the few bytes without a token vanish.
    try:
        bpe = BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False)
    except Exception as error:  # the library raises bare Exception
        raise Invalid(f"GGUF tokenizer: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != len(tokens):
        raise Invalid("GGUF tokenizer: two tokens have the same text")
    return tokenizer


def build_tokenizer_config(field: Callable[[str], Any]) -> Mapping[str, Any]:
    """Return what tokenizer_config.json holds: special tokens and the chat template."""
    tokens: list[str] = field("tokenizer.ggml.tokens")
    template = field("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise Invalid(f"GGUF: tokenizer.chat_template is no text: {template!r}")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(field("tokenizer.ggml.add_bos_token")),
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    for name, key in _SPECIAL_NAMES.items():
        index = token_id(field, key)
        if index is not None:
            config[name] = tokens[index]
    return config


def token_id(field: Callable[[str], Any], name: str) -> int | None:
    """Return a special token's id, or None; raises Invalid for one that is no token's."""
    found = field(f"tokenizer.ggml.{name}")
    count = len(field("tokenizer.ggml.tokens"))
    if found is None or (type(found) is int and 0 <= found < count):
        return found
    raise Invalid(f"GGUF: tokenizer.ggml.{name} is {found!r}; its tokenizer has {count} tokens")


def _list(field: Callable[[str], Any], name: str, kind: type) -> list[Any]:
    found = field(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise Invalid(f"GGUF: its metadata lack a usable tokenizer.ggml.{name}")
    return found


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
