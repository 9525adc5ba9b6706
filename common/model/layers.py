"""The few operations that every model family is made of. A row's result depends on that row alone.

`linear` is torch's matrix product: what makes it independent of the number of rows (padding to row
counts that were shown to be safe) has its place here and nowhere else. Everything else treats
values one by one or sums within a row; for bf16 models the compiled library does it where there
is one (kernels/row_operations.py), on so many `threads`. tests/test_products.py looks at the bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kvass.common.kernels import row_operations

_EXACT_LOGITS = 64  # well over the 20 log-probabilities that a client may ask for


def linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    counts: Sequence[int] = (),
) -> torch.Tensor:
    """Return rows [N, in] times weight [out, in] transposed, plus bias [out], in their dtype.

    `counts` (ascending) are the row counts to compute with (`products`): rows are padded to the
    next one, and more rows than the last are computed in pieces. Empty: as many as there are.
    """
    count = rows.shape[0]
    if not counts or not count:
        return F.linear(rows, weight, bias)
    if count > counts[-1]:
        return torch.cat(
            [linear(part, weight, bias, counts) for part in torch.split(rows, counts[-1])]
        )
    padding = counts[bisect_left(counts, count)] - count
    if not padding:
        return F.linear(rows, weight, bias)
    return F.linear(F.pad(rows, (0, 0, 0, padding)), weight, bias)[:count]


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, threads: int = 1
) -> torch.Tensor:
    """Scale float32 rows [N, width] to a mean square of one and by `weight`; in weight's dtype."""
    if _is_native(weight):
        return row_operations.norm(rows.contiguous(), None, weight, epsilon, threads)
    scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return (rows * scale * weight).to(weight.dtype)


def add_norm(
    rows: torch.Tensor,
    addend: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    threads: int = 1,
) -> torch.Tensor:
    """Add `addend` to float32 `rows`, in place, and return their `rms_norm`."""
    if _is_native(weight):
        return row_operations.norm(rows, addend, weight, epsilon, threads)
    rows += addend
    return rms_norm(rows, weight, epsilon)


def logits(rows: torch.Tensor, weight: torch.Tensor, counts: Sequence[int] = ()) -> torch.Tensor:
    """Return float32 logits [N, vocab] of rows [N, width]; `counts` as in `linear`.

    A product in bf16 rounds each logit to 8 bits, so that the best two are equal for one token in
    25 (default model): the best `_EXACT_LOGITS` are computed again, and kept, in float32.
    """
    rounded = linear(rows, weight, counts=counts)
    if rounded.dtype == torch.float32:
        return rounded
    best = rounded.topk(min(_EXACT_LOGITS, weight.shape[0]), dim=-1, sorted=False).indices
    exact = (weight[best].float() * rows.float()[:, None]).sum(-1)
    return rounded.float().scatter_(1, best, exact)


def gated_silu(gate_up: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """Return silu(gate) · up of rows [N, gate ‖ up].

    torch computes most values of silu many at a time and the rest, at the ends of rows and of
    threads' shares, one by one, with another exponential. In bf16 both give the same bits for each
    of the 65,536 values (a test looks); in float32 they don't, and `exp` alone does.
    """
    if _is_native(gate_up):
        return row_operations.gate(gate_up, threads)
    gate, up = gate_up.chunk(2, dim=-1)
    if gate.dtype == torch.float32:
        return gate / (1 + torch.exp(-gate)) * up
    return F.silu(gate) * up


def _is_native(like: torch.Tensor) -> bool:
    return like.dtype == torch.bfloat16 and row_operations.available()
