"""A llama of random blocks in a GGUF file, written by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from kvass.common.kernels.gguf_blocks import SIZES

HIDDEN, HEADS, KV_HEADS, INNER = 256, 4, 2, 512
# Where fp16 numbers stand in a block.
HALVES = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
# Mixed, as real files are, and by layer: v and down often have more bits, norms all.
KINDS = (
    {
        **{"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q8_0"},
        **{"ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ffn_down": "Q6_K"},
    },
    {
        **{"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q5_1"},
        **{"ffn_gate": "Q5_K", "ffn_up": "Q4_1", "ffn_down": "Q4_K"},
    },
)


def random_blocks(
    kind: str, outputs: int, inputs: int, scale: float = 1.0
) -> npt.NDArray[np.uint8]:
    """Return random bytes, but for the blocks' scales, which are normal numbers."""
    values, size = SIZES[kind]  # type: ignore[index]
    random = np.random.default_rng()
    raw = random.integers(0, 256, (outputs, inputs // values, size), dtype=np.uint8)
    for first in HALVES[kind]:
        numbers = random.standard_normal((*raw.shape[:2], 1)) * scale
        raw[..., first : first + 2] = numbers.astype(np.float16).view(np.uint8)
    return raw.reshape(outputs, -1)


def vocabulary() -> list[str]:
    """Every byte's character, and three tokens that mean something."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [chr(0x100 + place) for place in range(256 - len(plain))]
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, plain), *rest, "he"]


def write_gguf(
    path: Path,
    *,
    without: str = "",
    head: bool = False,
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write a whole file; `without` leaves a tensor out.

    `metadata` replaces values; None leaves one out, a numpy number is of its type.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(len(KINDS))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")

    def add(name: str, kind: str, outputs: int, inputs: int) -> None:
        if name != without:
            raw = random_blocks(kind, outputs, inputs, 2e-3)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])

    add("token_embd.weight", "Q8_0", len(tokens), HIDDEN)
    if head:
        add("output.weight", "Q6_K", len(tokens), HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    shapes |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    for layer, kinds in enumerate(KINDS):
        for name, kind in kinds.items():
            add(f"blk.{layer}.{name}.weight", kind, *shapes.get(name, (HIDDEN, HIDDEN)))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for name, value in (metadata or {}).items():
        writer.kv_data[0].pop(name, None)
        if value is not None:
            writer.kv_data[0][name] = _typed(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _typed(value: object) -> gguf.gguf_writer.GGUFValue:
    if isinstance(value, np.generic):
        names = {"u": "UINT", "i": "INT", "f": "FLOAT"}
        name = f"{names[value.dtype.kind]}{8 * value.dtype.itemsize}"
        return gguf.gguf_writer.GGUFValue(value.item(), gguf.GGUFValueType[name])
    return gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.get_type(value))
