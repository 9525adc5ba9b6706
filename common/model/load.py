"""Load a model directory's weights into the forward pass of its architecture.

`MODELS` is the table of forward passes; spec.py has the same names for reading configurations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import safe_open

from kvass.common.errors import Invalid
from kvass.common.kernels.gguf_blocks import BlockKind, Blocks, bf16_of
from kvass.common.kernels.seam import PagedKv, Plan
from kvass.common.model.checkpoint import TensorEntry, is_gguf, open_checkpoint
from kvass.common.model.llama import Llama
from kvass.common.model.projection import ProjectionOf, of_any_count
from kvass.common.model.spec import ModelSpec


class Model(Protocol):
    """A forward pass over rows; `llama.Llama.forward` says what the arguments are.

    `is_packed`: the compiled library multiplies, and torch does nothing that takes long.
    """

    spec: ModelSpec
    is_packed: bool

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv: PagedKv[Plan],
        plan: Plan,
        write_rows: torch.Tensor | None,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        logits_rows: torch.Tensor | None,
    ) -> torch.Tensor | None: ...


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MODELS = {"LlamaForCausalLM": Llama, "Qwen2ForCausalLM": Llama}


def load_model(
    model_dir: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.bfloat16,
    projection_of: ProjectionOf = of_any_count,
) -> Model:
    """Load and fuse the weights in `dtype`; raises Invalid if a tensor is missing or misshapen.

    `projection_of` says how each product is computed (`Products.projection`).
    """
    return MODELS[spec.architecture](spec, Reader(model_dir, spec, dtype), projection_of)


class Reader:
    """Reads a model directory's tensors by their checkpoint's names."""

    def __init__(self, model_dir: Path, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._entries = open_checkpoint(model_dir, spec)
        self._dtype = dtype
        paths = {entry.path for entry in self._entries.values()}
        self._is_gguf = is_gguf(model_dir)
        self._files = {} if self._is_gguf else {p: safe_open(p, framework="pt") for p in paths}

    def __call__(self, name: str) -> torch.Tensor | Blocks:
        """Return a tensor in the dtype to execute, or blocks where that is bf16.

        Of a GGUF file all values are rounded to bf16, as they are executed, for a pass in float32
        too: so K's offsets, and with them all KV, are those of its converted copy.
        """
        entry = self._entries[name]
        if not self._is_gguf:
            tensor: torch.Tensor = self._files[entry.path].get_tensor(name)  # type: ignore[no-untyped-call]
            return tensor.to(self._dtype)
        raw = _rows_of(entry)
        if not entry.in_blocks:
            tensor = raw.view(_DTYPES[entry.dtype]).view(entry.shape)
            rounded = tensor.to(torch.bfloat16)
            if not bool(rounded.isfinite().all()):
                raise Invalid(f"{entry.path}: {name} holds values that are not finite")
            return rounded.to(self._dtype)
        kind = cast(BlockKind, entry.dtype)
        blocks = Blocks(kind, entry.shape[1], raw).checked(f"{entry.path}: {name}")
        return blocks if self._dtype == torch.bfloat16 else bf16_of(blocks).to(self._dtype)


def _rows_of(entry: TensorEntry) -> torch.Tensor:
    """Return a GGUF file's tensor, uint8 [rows, bytes], its rows in a checkpoint's order."""
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        data = bytearray(entry.size)
        if file.readinto(data) != entry.size:
            raise Invalid(f"{entry.path}: it ends before byte {entry.offset + entry.size}")
    rows = entry.shape[0] if len(entry.shape) > 1 else 1
    raw = torch.frombuffer(data, dtype=torch.uint8).view(rows, -1)
    if not entry.permuted_heads:
        return raw
    pairs = raw.view(entry.permuted_heads, -1, 2, raw.shape[1])
    return pairs.transpose(1, 2).reshape(raw.shape)
