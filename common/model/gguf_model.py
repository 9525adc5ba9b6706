"""What a llama-architecture GGUF file is in our words: config, names, order of rows. Torch-free.

A GGUF model is a model directory whose weights are the file itself: `write_directory` makes
config.json and the tokenizer's files from its metadata, and a link to it. It refuses other
architectures by name.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvass.common.errors import Invalid
from kvass.common.model.gguf_file import GgufFile
from kvass.common.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config, token_id

LINK = "model.gguf"  # in a model directory: the weights
Field = Callable[[str], Any]  # a metadata value by name, or None

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Of llama.*: what `config_of` reads or compares; and what changes nothing with these values.
_KNOWN = {
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "attention.key_length")),
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.value_length", "vocab_size")),
    **dict.fromkeys(("block_count", "context_length", "embedding_length", "feed_forward_length")),
    **dict.fromkeys(("rope.dimension_count", "rope.freq_base", "rope.scaling.type")),
}
_NO_CHANGE = {
    **{"attention.causal": True, "attention.scale": 0.0, "expert_count": 0, "expert_used_count": 0},
    **{"attention.sliding_window": 0, "rope.scale_linear": 1.0, "rope.scaling.factor": 1.0},
}
_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.weight", re.ASCII)


def write_directory(source: Path, directory: Path) -> None:
    """Write a model directory's files into an existing directory; raises Invalid."""
    file = GgufFile.open(source)
    try:
        _refuse_others(file.metadata)
        config = config_of(file.metadata.get, tied="output.weight" not in file.tensors)
        tokenizer = build_tokenizer(file.metadata.get)
        tokenizer_config = build_tokenizer_config(file.metadata.get)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise Invalid(f"{source}: its metadata lack something, or are broken: {error}") from None
    except Invalid as error:
        raise Invalid(f"{source}: {error}") from None
    layers = _layers(source, file)
    if layers != config["num_hidden_layers"]:
        raise Invalid(
            f"{source}: llama.block_count is {config['num_hidden_layers']}, and it has tensors of "
            f"{layers} layers: its metadata are another model's, or it is not complete"
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "config.json", config)
    (directory / LINK).symlink_to(source.resolve())


def _refuse_others(metadata: Mapping[str, Any]) -> None:
    """Raise Invalid for a part of a model, and for a number that llama.cpp would compute with."""
    parts = metadata.get("split.count")
    if parts not in (None, 0, 1):
        raise Invalid(
            f"GGUF: one of {parts} parts of a model; join them with "
            "llama-gguf-split --merge FIRST WHOLE"
        )
    for name, value in metadata.items():
        kind, _, what = name.partition(".")
        if kind == "llama" and what not in _KNOWN and _NO_CHANGE.get(what) != value:
            raise Invalid(f"GGUF: {name} is {value!r}, which is not supported")


def _layers(source: Path, file: GgufFile) -> int:
    """Return how many layers it has tensors of; raises Invalid for one that no layer has."""
    found = set()
    for name in file.tensors:
        try:
            checkpoint_name(name)
        except Invalid as error:
            raise Invalid(f"{source}: {error}") from None
        if layer := _LAYER.fullmatch(name):
            found.add(int(layer[1]))
    return max(found, default=-1) + 1


def config_of(field: Field, *, tied: bool) -> dict[str, Any]:
    """Return config.json's content. Other errors than Invalid: metadata lack something."""
    architecture = field("general.architecture")
    if architecture != "llama":
        raise Invalid(
            f"GGUF architecture {architecture!r} is not supported; supported: llama. Other models "
            "are taken as directories (config.json, *.safetensors, tokenizer.json)"
        )
    if field("llama.rope.scaling.type") not in (None, "none") or field("llama.rope.factors"):
        raise Invalid("GGUF: scaled rope is not supported")

    def number(name: str, kind: type[int | float] = int) -> Any:
        found = field(f"llama.{name}")
        if not isinstance(found, kind) or isinstance(found, bool) or not 0 < found < 2**31:
            raise Invalid(f"GGUF: its metadata have no usable llama.{name}: {found!r}")
        return found

    heads, width = number("attention.head_count"), number("embedding_length")
    if width % heads:
        raise Invalid(f"GGUF: llama.embedding_length {width} is no multiple of {heads} heads")
    head_dim = width // heads
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if field(f"llama.{name}") not in (None, head_dim):
            raise Invalid(f"GGUF: llama.{name} other than {head_dim} is not supported")
    vocabulary = len(field("tokenizer.ggml.tokens") or ())
    if not vocabulary:
        raise Invalid("GGUF: it has no tokenizer (tokenizer.ggml.tokens): convert the model anew")
    if field("llama.vocab_size") not in (None, vocabulary):
        said = field("llama.vocab_size")
        raise Invalid(f"GGUF: llama.vocab_size is {said}; its tokenizer has {vocabulary} tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "vocab_size": vocabulary,
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(number("rope.freq_base", float)),
        "tie_word_embeddings": tied,
        "bos_token_id": token_id(field, "bos_token_id"),
        "eos_token_id": token_id(field, "eos_token_id"),
        "pad_token_id": token_id(field, "padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The shortest decimal that float32 stores as this: 1e-05, not 9.99999975e-06."""
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return float(value)


def checkpoint_name(name: str) -> str:
    """Return the name that a checkpoint has for a GGUF file's tensor; raises Invalid."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _LAYER_NAMES:
        raise Invalid(f"GGUF: the tensor {name} is not part of a llama model")
    return f"model.layers.{int(found[1])}.{_LAYER_NAMES[found[2]]}.weight"


def permuted_heads(name: str, heads: int, kv_heads: int) -> int:
    """Return the heads of which GGUF has rows in another order, by a checkpoint's name; or 0.

    It interleaves the two halves of each of q's and k's heads: row 2i is row i of the first half.
    """
    if name.endswith("self_attn.q_proj.weight"):
        return heads
    return kv_heads if name.endswith("self_attn.k_proj.weight") else 0


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write it as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
