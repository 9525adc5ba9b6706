"""The kernels seam: quantise-and-append and attention over a worker's paged pool.

*What is attended to is what is stored*: K and V are quantised when they enter the
pool and attention reads the pool, for the tokens of the current step too. A row's bits depend only
on its query, its position and the stored blocks before it: not on the batch, the chunk or the pool.

k, v and q are float32 or bf16, and may be views of one product's rows.

Shape letters: N rows (one query token each), Q query heads, H KV heads, D head_dim, G block tables.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from kvass.common.kernels.turn import Turn

Plan = TypeVar("Plan")


class PagedKv(Protocol[Plan]):
    """A paged pool's memory with the kernels that read and write it."""

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> Plan:
        """Prepare one step, once for all layers.

        `tables` int64 [G, blocks]: slots in chain order, padded with any valid slot. `row_table`
        int64 [N]: which table a row reads. `row_position` int64 [N]: the row's absolute position;
        it attends to positions 0 … row_position, its own included.
        """
        ...

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        """Quantise and store new KV of `layer`: k and v [M, H, D], into token `offsets` int64 [M]
        (0 … block_tokens-1) of `slots` int64 [M]. Turns k by its rows' positions (`turn`, of these
        M rows; None: it is turned already), takes K's offsets off and rotates K (and V for integer
        formats) itself.
        Touches no byte of any other token."""
        ...

    def attend(
        self, layer: int, q: torch.Tensor, plan: Plan, turn: Turn | None = None
    ) -> torch.Tensor:
        """Return attention outputs float32 [N, Q, D] for queries [N, Q, D] (not scaled, not
        rotated; `turn` of these N rows, or None: turned already); query head i reads KV head
        i // (Q / H)."""
        ...
