"""Turning heads by their rows' positions (rope), in float32: channel i with channel i + D/2. Pure.

Products and sums are rounded one by one. One row's result depends on its own angles alone; which
angles a position has is the model's to say (`model/rope.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Turn(NamedTuple):
    """Cosine and sine of rows' positions, float32 [N, D/2] each, contiguous."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def of_rows(self, rows: torch.Tensor) -> Turn:
        """Return the turn of rows int64 [M]."""
        return Turn(self.cosine[rows], self.sine[rows])


def turned(heads: torch.Tensor, turn: Turn | None) -> torch.Tensor:
    """Return heads [N, H, D] as float32, turned unless there is nothing to turn by."""
    heads = heads.to(torch.float32)
    if turn is None:
        return heads
    cosine, sine = turn.cosine[:, None], turn.sine[:, None]
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
