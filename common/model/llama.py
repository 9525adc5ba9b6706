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
from typing import Generic

import torch

from kvass.common.kernels.seam import PagedKv, Plan
from kvass.common.kernels.turn import Turn
from kvass.common.model.layers import gated_silu, linear, logits, rms_norm
from kvass.common.model.rope import angles, inverse_frequencies
from kvass.common.model.spec import ModelSpec

Read = Callable[[str], torch.Tensor]
# Given a product's weight and bias, the row counts that it may be computed with (`products`).
CountsOf = Callable[[torch.Tensor, torch.Tensor | None], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Projection:
    """A weight [out, in], its bias [out], if it has one, and the row counts to compute it with."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    counts: Sequence[int]

    @classmethod
    def of(
        cls, counts_of: CountsOf, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Projection:
        return cls(weight, bias, counts_of(weight, bias))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias, self.counts)

    def split(self, width: int, counts_of: CountsOf) -> tuple[Projection, Projection]:
        """Return the first `width` outputs and the rest, as views."""
        first, rest = (None, None) if self.bias is None else self.bias.tensor_split([width])
        return (
            Projection.of(counts_of, self.weight[:width], first),
            Projection.of(counts_of, self.weight[width:], rest),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer's weights, in the model's dtype."""

    attention_norm: torch.Tensor
    qkv: Projection
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class Llama:
    """The weights and the forward pass. Immutable after loading."""

    def __init__(self, spec: ModelSpec, read: Read, counts_of: CountsOf) -> None:
        """`read` returns a checkpoint's tensor by name, in the dtype to execute."""
        self.spec = spec
        self._embedding = read("model.embed_tokens.weight")
        self._layers = [
            _read_layer(spec, read, counts_of, f"model.layers.{i}") for i in range(spec.layers)
        ]
        self._last_q, self._last_both = self._layers[-1].qkv.split(spec.q_size, counts_of)
        self._norm = read("model.norm.weight")
        head = self._embedding if spec.tie_embeddings else read("lm_head.weight")
        self._head = Projection.of(counts_of, head)
        self._frequencies = inverse_frequencies(spec)

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
        rows = self._embedding[tokens].float()
        for index, layer in enumerate(self._layers[:-1]):
            normed = rms_norm(rows, layer.attention_norm, self.spec.rms_norm_eps)
            fused = layer.qkv(normed)
            q, both = fused[:, : self.spec.q_size], fused[:, self.spec.q_size :]
            step.append(index, self._heads(both))
            rows = self._rest(layer, rows, step.attend(index, self._heads(q)))
        return self._last(rows, step, logits_rows)

    def _last(
        self, rows: torch.Tensor, step: _Step[Plan], logits_rows: torch.Tensor | None
    ) -> torch.Tensor | None:
        index, layer, epsilon = self.spec.layers - 1, self._layers[-1], self.spec.rms_norm_eps
        normed = rms_norm(rows, layer.attention_norm, epsilon)
        step.append(index, self._heads(self._last_both(normed)))
        if logits_rows is None:
            return None
        attended = step.attend(index, self._heads(self._last_q(normed)))
        chosen = self._rest(layer, rows[logits_rows], attended[logits_rows])
        return logits(rms_norm(chosen, self._norm, epsilon), self._head.weight, self._head.counts)

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(rows.shape[0], -1, self.spec.head_dim)

    def _rest(self, layer: Layer, rows: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Everything after attention; `attended` float32 [N, Q, D]."""
        rows = rows + layer.output(attended.flatten(1).to(layer.output.weight.dtype))
        normed = rms_norm(rows, layer.mlp_norm, self.spec.rms_norm_eps)
        return rows + layer.down(gated_silu(layer.gate_up(normed)))


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


def _read_layer(spec: ModelSpec, read: Read, counts_of: CountsOf, prefix: str) -> Layer:
    def projection(*names: str) -> Projection:
        weights = [read(f"{prefix}.{name}_proj.weight") for name in names]
        bias = None
        if spec.qkv_bias and names[0] == "self_attn.q":
            bias = torch.cat([read(f"{prefix}.{name}_proj.bias") for name in names])
        fused = torch.cat(weights) if len(weights) > 1 else weights[0]
        return Projection.of(counts_of, fused, bias)

    return Layer(
        attention_norm=read(f"{prefix}.input_layernorm.weight"),
        qkv=projection("self_attn.q", "self_attn.k", "self_attn.v"),
        output=projection("self_attn.o"),
        mlp_norm=read(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=projection("mlp.gate", "mlp.up"),
        down=projection("mlp.down"),
    )
