"""The Llama family's forward pass: Llama, SmolLM, Qwen2 (with biases on q, k and v).

It computes rows, each one token of some request, and knows nothing of requests, batches or blocks:
where K and V go and what a query sees is the paged pool's business (kernels/seam.py). Weights are
fused (q‖k‖v, gate‖up), but for the last layer's q, which prefill leaves out: there q and k‖v are
two products always, so that a row's bits do not depend on who computes it. The sum that runs
through the layers is float32 (as bf16 it halves the agreement with float32 arithmetic); products
are in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic

import torch

from kvass.common.kernels.gguf_blocks import Blocks, bf16_of, stacked
from kvass.common.kernels.native_paged import NativePagedKv, NativePlan
from kvass.common.kernels.packed import PackedWeight
from kvass.common.kernels.packed_layers import PackedLayer, PackedLayers
from kvass.common.kernels.seam import PagedKv, Plan
from kvass.common.kernels.turn import Turn
from kvass.common.model.layers import add_norm, gated_silu, rms_norm
from kvass.common.model.projection import Projection, ProjectionOf, StackedProjection
from kvass.common.model.rope import angles, inverse_frequencies
from kvass.common.model.spec import ModelSpec

# A checkpoint's tensor by name, in the dtype to execute; blocks are executed as bf16.
Read = Callable[[str], torch.Tensor | Blocks]


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer's weights, in the model's dtype. `qkv`: one product, or q and k‖v."""

    attention_norm: torch.Tensor
    qkv: tuple[Projection, ...]
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class Llama:
    """The weights and the forward pass. Immutable after loading."""

    def __init__(self, spec: ModelSpec, read: Read, projection_of: ProjectionOf) -> None:
        self.spec = spec
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [
            _read_layer(spec, read, projection_of, index) for index in range(spec.layers)
        ]
        self._norm = _vector(read("model.norm.weight"))
        head = self._embedding if spec.tie_embeddings else read("lm_head.weight")
        self._head = projection_of(head, None, is_head=True)
        self.is_packed = isinstance(self._head, PackedWeight)
        self._frequencies = inverse_frequencies(spec)
        self._threads = torch.get_num_threads()  # the compiled library's; torch's may change
        self._packed = _packed_layers(spec, self._layers)

    @property
    def runs_in_one_call(self) -> bool:
        """Whether the compiled library runs all layers but the last, where it reads the pool."""
        return self._packed is not None

    @torch.inference_mode()
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
    ) -> torch.Tensor | None:
        """Compute one step over rows of `tokens` int64 [N] at `positions` int64 [N].

        `write_rows` int64 [M] are the rows whose K and V are stored, in `slots` and `offsets` int64
        [M] (None: all rows, in order); any other row reads what is stored already. Returns logits
        float32 [R, vocab] of `logits_rows` int64 [R]; when None, of the last layer only K and V are
        computed and nothing is returned. `plan` is `kv.plan(…)` of the same rows.
        """
        turn = angles(positions, self._frequencies)
        write_turn = turn if write_rows is None else turn.of_rows(write_rows)
        step = _Step(kv, plan, turn, write_turn, write_rows, slots, offsets)
        rows = self._embedded(tokens)
        first = self._layers[0].attention_norm
        normed = rms_norm(rows, first, self.spec.rms_norm_eps, self._threads)
        if self._packed is not None and write_rows is None and isinstance(kv, NativePagedKv):
            assert isinstance(plan, NativePlan)
            self._packed.run(rows, normed, kv, plan, turn, slots, offsets)
        else:
            normed = self._one_by_one(rows, normed, step)
        return self._last(rows, normed, step, logits_rows)

    def _one_by_one(
        self, rows: torch.Tensor, normed: torch.Tensor, step: _Step[Plan]
    ) -> torch.Tensor:
        """Compute all layers but the last: adds to `rows`, returns what the last one reads."""
        for index, (layer, after) in enumerate(pairwise(self._layers)):
            fused = layer.qkv[0](normed)
            q, both = fused[:, : self.spec.q_size], fused[:, self.spec.q_size :]
            step.append(index, self._heads(both))
            attended = step.attend(index, self._heads(q))
            normed = self._rest(layer, rows, attended, after.attention_norm)
        return normed

    def _last(
        self,
        rows: torch.Tensor,
        normed: torch.Tensor,
        step: _Step[Plan],
        logits_rows: torch.Tensor | None,
    ) -> torch.Tensor | None:
        index, layer = self.spec.layers - 1, self._layers[-1]
        to_q, to_both = layer.qkv
        step.append(index, self._heads(to_both(normed)))
        if logits_rows is None:
            return None
        attended = step.attend(index, self._heads(to_q(normed)))
        normed = self._rest(layer, rows[logits_rows], attended[logits_rows], self._norm)
        return self._head.logits(normed)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(self._embedding, Blocks):
            return bf16_of(self._embedding.rows(tokens)).float()
        return self._embedding[tokens].float()

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(rows.shape[0], -1, self.spec.head_dim)

    def _rest(
        self, layer: Layer, rows: torch.Tensor, attended: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        """Everything after attention; `attended` float32 [N, Q, D].

        Adds to `rows`, in place, and returns them scaled by what follows: the weight `norm`.
        """
        epsilon, threads = self.spec.rms_norm_eps, self._threads
        output = layer.output(attended.flatten(1).to(norm.dtype))
        normed = add_norm(rows, output, layer.mlp_norm, epsilon, threads)
        gated = gated_silu(layer.gate_up(normed), threads)
        return add_norm(rows, layer.down(gated), norm, epsilon, threads)


@dataclass(frozen=True, slots=True)
class _Step(Generic[Plan]):
    """What one step's layers share. `turn` is of all rows, `write_turn` of the rows to write."""

    kv: PagedKv[Plan]
    plan: Plan
    turn: Turn
    write_turn: Turn
    write_rows: torch.Tensor | None
    slots: torch.Tensor
    offsets: torch.Tensor

    def append(self, index: int, both: torch.Tensor) -> None:
        """Store the K and V of the rows to write; `both` [N, k heads ‖ v heads, D], before rope."""
        k, v = (both if self.write_rows is None else both[self.write_rows]).chunk(2, dim=1)
        self.kv.append(index, k, v, self.slots, self.offsets, self.write_turn)

    def attend(self, index: int, q: torch.Tensor) -> torch.Tensor:
        return self.kv.attend(index, q, self.plan, self.turn)


def _packed_layers(spec: ModelSpec, layers: Sequence[Layer]) -> PackedLayers | None:
    """Return all layers but the last as the compiled library runs them; None where it does not."""
    packed = []
    for layer, after in pairwise(layers):
        fused = layer.qkv[0]
        qkv = fused.parts if isinstance(fused, StackedProjection) else (fused,)
        weights = (*qkv, layer.output, layer.gate_up, layer.down)
        all_packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        if len(all_packed) < len(weights):
            return None
        *in_turn, output, gate_up, down = all_packed
        norms = (layer.mlp_norm, after.attention_norm)
        packed.append(PackedLayer(tuple(in_turn), output, gate_up, down, *norms))
    size = spec.kv_heads * spec.head_dim
    return PackedLayers(packed, size, spec.rms_norm_eps) if packed else None


def _read_layer(spec: ModelSpec, read: Read, projection_of: ProjectionOf, index: int) -> Layer:
    prefix = f"model.layers.{index}"

    def projection(*names: str) -> Projection:
        weights = [read(f"{prefix}.{name}_proj.weight") for name in names]
        bias = None
        if spec.qkv_bias and names[0].startswith("self_attn.") and names[0] != "self_attn.o":
            bias = torch.cat([_vector(read(f"{prefix}.{name}_proj.bias")) for name in names])
        return projection_of(stacked(weights) if len(weights) > 1 else weights[0], bias)

    q, both = "self_attn.q", ("self_attn.k", "self_attn.v")
    is_last = index == spec.layers - 1
    return Layer(
        attention_norm=_vector(read(f"{prefix}.input_layernorm.weight")),
        qkv=(projection(q), projection(*both)) if is_last else (projection(q, *both),),
        output=projection("self_attn.o"),
        mlp_norm=_vector(read(f"{prefix}.post_attention_layernorm.weight")),
        gate_up=projection("mlp.gate", "mlp.up"),
        down=projection("mlp.down"),
    )


def _vector(found: torch.Tensor | Blocks) -> torch.Tensor:
    assert isinstance(found, torch.Tensor), "a checkpoint has blocks in matrices only"
    return found
