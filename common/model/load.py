"""Load a model directory's weights into the forward pass of its architecture.

`MODELS` is the table of forward passes; spec.py has the same names for reading configurations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from kvass.common.kernels.seam import PagedKv, Plan
from kvass.common.model.checkpoint import open_checkpoint
from kvass.common.model.llama import Llama, Read
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
    return MODELS[spec.architecture](spec, _reader(model_dir, spec, dtype), projection_of)


def _reader(model_dir: Path, spec: ModelSpec, dtype: torch.dtype) -> Read:
    entries = open_checkpoint(model_dir, spec)
    paths = {entry.path for entry in entries.values()}
    files = {path: safe_open(path, framework="pt") for path in paths}

    def read(name: str) -> torch.Tensor:
        tensor: torch.Tensor = files[entries[name].path].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor.to(dtype)

    return read
