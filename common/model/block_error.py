"""How far two slots' KV is apart: what rounding can explain, and what it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from sys import float_info

import torch

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.model.known_answer import read_back
from kvass.common.pool.memory import SlotMemory

# The largest relative L2 error of one head's K, and V, in one layer of a block that honest workers
# can come to where their sums are made in another order: twice (of int4, 1.6 times) what was
# measured for the default model, with the same products from other kernels (AVX2, AVX-512 without
# BF16) and with weights in float32 (`benchmarks/audit.py`; of int4 K 0.384 and V 0.317, over 16
# texts: code, prose, tokens by chance). K carries less of it, and tells positions apart. A flipped
# bit of low worth is within these bounds; another head, layer, position or token is not. But of
# int4 another position or token may be: from 0.23 on, among the errors of honest workers. Between
# workers that are deterministic and of one namespace nothing differs, and the audit allows nothing.
BOUNDS: dict[KvDtype, tuple[float, float]] = {
    "fp8": (0.16, 0.34),
    "int8": (0.06, 0.12),
    "int4": (0.6, 0.6),
    "bf16": (0.04, 0.07),
}


def block_error(memory: SlotMemory, layout: BlockLayout, one: int, other: int) -> float:
    """Return how far `other` is from `one`, as a share of what rounding can do: 0.0 only where all
    bits are equal, above 1.0 where something was wrong, infinite where there is no number."""
    return float(block_errors(memory, layout, [one], [other])[0])


def block_errors(
    memory: SlotMemory, layout: BlockLayout, ones: list[int], others: list[int]
) -> torch.Tensor:
    """Return the same for many pairs, float64 [pairs]."""
    most = torch.zeros(len(ones), dtype=torch.float64)
    for layer in range(layout.layers):
        for value in (False, True):
            pieces = (_pieces(memory, layout, slots, layer, value) for slots in (ones, others))
            differ = torch.stack([(a != b).any(-1) for a, b in zip(*pieces, strict=True)]).any(0)
            if differ.any():
                bound = BOUNDS[layout.kv_dtype][value]
                errors = _record_errors(memory, layout, ones, others, layer, value) / bound
                # The sign of a zero is a bit too.
                most = torch.where(differ, most.maximum(errors.clamp_min(float_info.min)), most)
    return most


def _record_errors(
    memory: SlotMemory,
    layout: BlockLayout,
    ones: list[int],
    others: list[int],
    layer: int,
    value: bool,
) -> torch.Tensor:
    """Return each pair's largest error of a head."""
    split = (len(ones), layout.block_tokens, layout.kv_heads, layout.head_dim)
    ours, theirs = (
        read_back(memory, layout, slots, layer, value).view(split) for slots in (ones, others)
    )
    size = ours.norm(dim=(1, 3)).clamp_min(1e-6)
    error = (theirs - ours).norm(dim=(1, 3)) / size
    largest: torch.Tensor = error.nan_to_num(nan=float("inf")).amax(-1)
    return largest.to(torch.float64)


def digest(memory: SlotMemory, layout: BlockLayout, slots: Sequence[int]) -> bytes:
    """Name the bytes of slots, without padding."""
    named = blake2b()
    for slot in slots:
        for layer in range(layout.layers):
            for value in (False, True):
                for piece in _pieces(memory, layout, [slot], layer, value):
                    named.update(piece.numpy().data)
    return named.digest()


def _pieces(
    memory: SlotMemory, layout: BlockLayout, slots: list[int], layer: int, value: bool
) -> list[torch.Tensor]:
    """Return a record's bytes, uint8 [slots, bytes] a head group: without padding, which nobody
    writes."""
    size = layout.codes_size + layout.scales_size
    starts = (layout.record_offset(group, layer, value) for group in range(layout.head_groups))
    return [memory.tensor[slots, start : start + size] for start in starts]
