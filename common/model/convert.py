"""Convert a GGUF file to a model directory: `python -m kvass.common.model.convert FILE DIRECTORY`.

Torch-free: tensors are dequantised with the `gguf` package, rounded to bf16 (to nearest, ties to
even) and written as one safetensors file with config.json and the tokenizer's files beside it. It
knows the llama architecture only, and refuses others by name.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from kvass.common.errors import Invalid
from kvass.common.model.gguf_tokenizer import build_tokenizer, build_tokenizer_config

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


def convert(source: Path, directory: Path) -> None:
    """Write the model directory's files into an existing directory; raises Invalid."""
    reader = gguf.GGUFReader(source)

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    config = _config(field, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    build_tokenizer(field).save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", build_tokenizer_config(field))
    _write_json(directory / "config.json", config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = [(_checkpoint_name(tensor.name), tensor) for tensor in reader.tensors]
    shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in tensors}

    def values() -> Iterator[npt.NDArray[np.uint16]]:
        for name, tensor in tensors:
            value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if name.endswith("q_proj.weight"):
                value = unpermute(value, heads)
            elif name.endswith("k_proj.weight"):
                value = unpermute(value, kv_heads)
            yield to_bf16(value)

    write_bf16(directory / "model.safetensors", shapes, values())


def _config(field: Callable[[str], Any], *, tied: bool) -> dict[str, Any]:
    architecture = field("general.architecture")
    if architecture != "llama":
        raise Invalid(f"GGUF architecture {architecture!r} is not supported; supported: llama")
    if field("llama.rope.scaling.type") not in (None, "none") or field("llama.rope.factors"):
        raise Invalid("GGUF: scaled rope is not supported")
    heads, width = field("llama.attention.head_count"), field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": width // heads,
        "max_position_embeddings": field("llama.context_length"),
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "rms_norm_eps": _shortest(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(field("llama.rope.freq_base")),
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }


def _shortest(value: float) -> float:
    """The decimal that was stored as float32: 1e-05, not 9.99999975e-06."""
    return float(str(np.float32(value)))


def _checkpoint_name(name: str) -> str:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    raise Invalid(f"GGUF: the tensor {name} is not part of a llama model")


def unpermute(value: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo GGUF's order of q's and k's rows, which interleaves the two halves of each head."""
    rows, columns = value.shape
    pairs = value.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def to_bf16(value: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bf16's bits, to nearest with ties to even; values must be finite."""
    if not np.isfinite(value).all():
        raise Invalid("GGUF: a tensor holds values that are not finite")
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_bf16(
    path: Path, shapes: dict[str, tuple[int, ...]], values: Iterator[npt.NDArray[np.uint16]]
) -> None:
    """Write one safetensors file, tensor by tensor, in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format's alignment
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape, value in zip(shapes.values(), values, strict=True):
            assert value.size == int(np.prod(shape)), (shape, value.shape)
            file.write(value.astype("<u2", copy=False).data)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run as a process of its own, so that the caller never holds the tensors."""
    source, directory = arguments
    try:
        convert(Path(source), Path(directory))
    except (Invalid, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
