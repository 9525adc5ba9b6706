"""Random models of odd shapes, and runners over pools full of garbage: for comparing bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.kernels.paged import paged_kv
from kvass.common.model.llama import Llama
from kvass.common.model.load import Model
from kvass.common.model.products import Products
from kvass.common.model.projection import ProjectionOf
from kvass.common.model.runner import Rows, Runner, uses
from kvass.common.model.spec import ModelSpec, tensor_shapes
from kvass.common.pool.memory import SlotMemory

BLOCK = 16
GARBAGE = 0xFF  # NaN in every format


def spec_of(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    hidden: int,
    inner: int,
    vocabulary: int = 211,
    bias: bool = False,
    tied: bool = True,
) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen2ForCausalLM" if bias else "LlamaForCausalLM",
        layers=2,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        vocab_size=vocabulary,
        rope_theta=10_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
        qkv_bias=bias,
        max_position_embeddings=4096,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


SPECS: dict[str, tuple[ModelSpec, torch.dtype]] = {
    "float32, head_dim 80": (
        spec_of(4, 2, 80, hidden=48, inner=101, tied=False),
        torch.float32,
    ),
    "bf16, head_dim 64, 4096 inner": (spec_of(6, 2, 64, hidden=96, inner=4096), torch.bfloat16),
    "bf16, head_dim 128, biases": (
        spec_of(3, 1, 128, hidden=101, inner=77, vocabulary=193, bias=True),
        torch.bfloat16,
    ),
}


def model_of(name: str, projection_of: ProjectionOf | None = None) -> Llama:
    """Return a random model; with products found for it unless `projection_of` is given."""
    spec, dtype = SPECS[name]
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=generator) * (0.7 if len(shape) == 1 else 0.3)
        for name, shape in tensor_shapes(spec).items()
    }
    return Llama(spec, lambda name: tensors[name].to(dtype), projection_of or found_for())


def found_for() -> ProjectionOf:
    products = Products(uses())
    return products.projection


@dataclass(slots=True)
class Bench:
    """A model over a pool whose unwritten bytes are garbage. Mutable: the pool's memory."""

    model: Model
    kv_dtype: KvDtype
    slots: int
    memory: SlotMemory = field(init=False)
    runner: Runner = field(init=False)

    def __post_init__(self) -> None:
        spec = self.model.spec
        layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK, self.kv_dtype)
        self.memory = SlotMemory(layout, self.slots)
        self.memory.array.fill(GARBAGE)
        kv = paged_kv(self.memory, layout, spec.heads)
        assert kv.deterministic
        self.runner = Runner(self.model, kv, BLOCK)

    def forget(self) -> None:
        """Fill the pool with garbage again."""
        self.memory.array.fill(GARBAGE)

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        return self.runner.run(pieces)

    def stored(self, slots: Sequence[int]) -> torch.Tensor:
        return self.memory.tensor[list(slots)].clone()


def blocks_of(length: int) -> int:
    return -(-length // BLOCK)
