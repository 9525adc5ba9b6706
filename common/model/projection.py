"""A weight [out, in] that rows are multiplied by: what the models' layers hold.

Two things can be one: `kernels/packed.PackedWeight`, where the machine has the instructions, and
`TorchProjection`; or several of them, stacked. Which one it is gets decided once, when a model is
loaded (`Products.projection`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvass.common.kernels.gguf_blocks import Matrix, bf16_of
from kvass.common.model.layers import linear, logits


class Projection(Protocol):
    """Multiplies rows [N, in] by a weight and adds its bias, if it has one."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product [N, out] in the rows' dtype."""
        ...

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return it in float32, precise where it is greatest."""
        ...


class ProjectionOf(Protocol):
    """Makes what multiplies by a weight [out, in], with its bias [out] or None."""

    def __call__(
        self, weight: Matrix, bias: torch.Tensor | None, *, is_head: bool = False
    ) -> Projection:
        """`is_head`: it makes the logits."""
        ...


@dataclass(frozen=True, slots=True)
class TorchProjection:
    """A weight, its bias, and the row counts to compute it with (`products`; empty: any)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    counts: Sequence[int]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias, self.counts)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        return logits(rows, self.weight, self.counts)


@dataclass(frozen=True, slots=True)
class StackedProjection:
    """Weights one below the other that are kept in several ways: each has columns of the result."""

    parts: Sequence[Projection]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(rows) for part in self.parts], -1)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.logits(rows) for part in self.parts], -1)


def of_any_count(weight: Matrix, bias: torch.Tensor | None, *, is_head: bool = False) -> Projection:
    """Promise nothing: compute as many rows as there are."""
    return TorchProjection(bf16_of(weight), bias, ())
