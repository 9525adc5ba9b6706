"""What a model is made of, read from its config.json. Torch-free.

It knows the shapes and constants of every supported architecture and the names of the tensors that
a checkpoint of it must hold. It refuses to guess: an architecture, rope, activation or quantisation
that the forward pass does not implement is refused by name.

A new model family adds one reader to `ARCHITECTURES` and one forward pass to `load.MODELS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvass.common.errors import Invalid


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's stretched rope (`rope_type: llama3`): long wavelengths are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of one model. `eos_token_ids` holds every id that ends a generation."""

    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    rope_scaling: Llama3Rope | None
    rms_norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        dimensions = (
            *(self.layers, self.hidden_size, self.heads, self.kv_heads, self.head_dim),
            *(self.intermediate_size, self.vocab_size, self.max_position_embeddings),
        )
        if min(dimensions) < 1:
            raise Invalid(f"model config: every size must be at least 1: {self}")
        if self.heads % self.kv_heads:
            raise Invalid(
                f"model config: num_attention_heads is {self.heads}, no multiple of "
                f"num_key_value_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise Invalid(f"model config: head_dim is {self.head_dim}; rope needs an even one")

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all KV heads together, K or V."""
        return self.kv_heads * self.head_dim


def load_spec(model_dir: Path) -> ModelSpec:
    """Read a model directory's config.json (and generation_config.json); raises Invalid."""
    raw = read_json(model_dir / "config.json")
    names = raw.get("architectures") or []
    name = names[0] if names else "(none)"
    reader = ARCHITECTURES.get(name)
    if reader is None:
        raise Invalid(
            f"{model_dir}: architecture {name} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    path = model_dir / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    return reader(raw, generation)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises Invalid with the file named."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Invalid(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise Invalid(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_llama(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """Llama, SmolLM: no biases."""
    for name in ("attention_bias", "mlp_bias"):
        _expect(raw, name, (None, False))
    return _read_dense(raw, generation, qkv_bias=False)


def _read_qwen2(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """Qwen2, Qwen2.5: biases on q, k and v only; sliding windows are not implemented."""
    _expect(raw, "use_sliding_window", (None, False))
    return _read_dense(raw, generation, qkv_bias=True)


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": _read_llama,
    "Qwen2ForCausalLM": _read_qwen2,
}


def _expect(raw: Mapping[str, Any], name: str, accepted: tuple[object, ...]) -> None:
    if raw.get(name) not in accepted:
        raise Invalid(f"model config: {name} is {raw[name]!r}, which is not supported")


def _read_dense(
    raw: Mapping[str, Any], generation: Mapping[str, Any], *, qkv_bias: bool
) -> ModelSpec:
    _expect(raw, "hidden_act", (None, "silu"))
    _expect(raw, "quantization_config", (None,))
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise Invalid(f"model config: layer_types is {raw['layer_types']!r}; only full_attention")
    try:
        heads = int(raw["num_attention_heads"])
        theta, scaling = _read_rope(raw)
        return ModelSpec(
            architecture=raw["architectures"][0],
            layers=int(raw["num_hidden_layers"]),
            hidden_size=int(raw["hidden_size"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(raw["rms_norm_eps"]),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=qkv_bias,
            max_position_embeddings=int(raw["max_position_embeddings"]),
            eos_token_ids=_token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
            bos_token_id=raw.get("bos_token_id"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Invalid(f"model config: {type(error).__name__}: {error}") from None


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Read both spellings: `rope_parameters` (transformers 5), `rope_theta` + `rope_scaling`."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise Invalid("model config: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise Invalid(
            f"model config: rope_type {kind!r} is not supported; supported: default, llama3"
        )
    scaling = Llama3Rope(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position_embeddings=int(parameters["original_max_position_embeddings"]),
    )
    return theta, scaling


def _token_ids(*values: object) -> tuple[int, ...]:
    """Join ids and lists of ids, without repeats, in order."""
    found: dict[int, None] = {}
    for value in values:
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return every tensor that the model executes: its name in a checkpoint and its shape."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for name, width in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (width, hidden)
            if spec.qkv_bias:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (width,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, spec.q_size)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes
