"""A test double of the kernels seam: float32 KV kept whole, attention by definition, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvass.common.kernels.turn import Turn, turned


@dataclass(frozen=True)
class DensePlan:
    """The arguments of `plan`, kept."""

    tables: torch.Tensor
    row_table: torch.Tensor
    row_position: torch.Tensor


class DenseKv:
    """A pool of float32 slots. Mutable: `memory` [layers, K|V, slots, block_tokens, H, D]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, *, slots: int, block_tokens: int = 16
    ) -> None:
        self.block_tokens = block_tokens
        self.memory = torch.full((layers, 2, slots, block_tokens, kv_heads, head_dim), torch.nan)

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> DensePlan:
        return DensePlan(tables, row_table, row_position)

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        self.memory[layer, 0, slots, offsets] = turned(k, turn)
        self.memory[layer, 1, slots, offsets] = v.float()

    def attend(
        self, layer: int, q: torch.Tensor, plan: DensePlan, turn: Turn | None = None
    ) -> torch.Tensor:
        q = turned(q, turn)
        share = q.shape[1] // self.memory.shape[4]
        outputs = torch.empty_like(q)
        for row, (table, position) in enumerate(
            zip(plan.row_table.tolist(), plan.row_position.tolist(), strict=True)
        ):
            k, v = self.memory[layer, :, plan.tables[table]].flatten(1, 2)[:, : position + 1]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            scores = torch.einsum("qd,tqd->qt", q[row], k) * q.shape[-1] ** -0.5
            outputs[row] = torch.einsum("qt,tqd->qd", scores.softmax(-1), v)
        return outputs
