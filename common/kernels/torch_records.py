"""Views of a pool's records, one layer at a time, and scratch memory that steps share.

All pointer arithmetic comes from `BlockLayout`; this only turns its sizes into strided tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from kvass.common.block import SCALE_BYTES, BlockLayout
from kvass.common.kernels.formats import CODE_DTYPES

# Codes are copied in the widest words that a row divides into: fewer, cheaper moves.
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Records:
    """Views of one layer's records in a pool.

    `whole` int64 [slots, G, words of K's and V's records]; `codes` [slots, tokens, G, 2, heads,
    words of a row] of `word` dtype; `scales` bf16 [slots, tokens, G, 2, heads, parts], or None.
    """

    whole: torch.Tensor
    codes: torch.Tensor
    word: torch.dtype
    scales: torch.Tensor | None


def records_of(pool: torch.Tensor, layout: BlockLayout, layer: int) -> Records:
    """Return the views of `layer` in a pool, uint8 [slots, block_size] and contiguous."""
    flat = pool.view(-1)
    start = layout.record_offset(0, layer, False)
    slots, groups = pool.shape[0], layout.head_groups
    row, parts = layout.row_size, layout.scale_parts
    width = next(width for width in _WORDS if row % width == 0)
    size = (slots, groups, 2, layout.group_heads, layout.block_tokens)
    outer = (layout.block_size, layout.group_size, layout.record_size)
    codes = _view(
        flat, _WORDS[width], (*size, row // width), (*outer, layout.block_tokens * row, row), start
    )
    scales = None
    if layout.has_scales:
        step = layout.block_tokens * SCALE_BYTES
        sizes, strides = (*size[:-1], parts, size[-1]), (*outer, parts * step, step)
        scales = _view(flat, torch.bfloat16, sizes, strides, start + layout.codes_size)
        scales = scales.permute(0, 5, 1, 2, 3, 4)
    whole = _view(flat, torch.int64, (slots, groups, layout.layer_size // 8), outer[:2], start)
    return Records(whole, codes.permute(0, 4, 1, 2, 3, 5), _WORDS[width], scales)


def _view(
    flat: torch.Tensor,
    dtype: torch.dtype,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> torch.Tensor:
    """View bytes as `dtype`; `offset` and `strides` (the last, one element, left out) in bytes."""
    width = dtype.itemsize
    assert offset % width == 0 and not any(stride % width for stride in strides)
    steps = [stride // width for stride in strides]
    return torch.as_strided(flat.view(dtype), size, [*steps, 1], offset // width)


def split_records(
    raw: torch.Tensor, layout: BlockLayout, items: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """View gathered records, int64 [items * blocks, G, words], as codes and scales.

    Codes [2, items, G, heads, blocks, tokens, codes of a row] (K first) and scales, with parts in
    place of codes.
    """
    blocks = raw.shape[0] // items
    records = raw.view(torch.uint8).view(items, blocks, layout.head_groups, 2, layout.record_size)
    lead = records.shape[:-1]
    rows = (layout.group_heads, layout.block_tokens)
    codes = records[..., : layout.codes_size].view(CODE_DTYPES[layout.kv_dtype])
    codes = codes.view(*lead, *rows, -1).permute(3, 0, 2, 4, 1, 5, 6)
    if not layout.has_scales:
        return codes, None
    stop = layout.codes_size + layout.scales_size
    scales = records[..., layout.codes_size : stop].view(torch.bfloat16)
    scales = scales.view(*lead, rows[0], layout.scale_parts, rows[1])
    return codes, scales.permute(3, 0, 2, 4, 1, 6, 5)


class Scratch:
    """Memory that every layer and step uses again. Mutable fields: `_held`, one buffer a name.

    The plan bounds what is asked for, so buffers stop growing. A view stays valid when its buffer
    was replaced by a larger one.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(
        self, name: str, size: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a contiguous tensor of any content, sharing memory with others of its name."""
        count = prod(size)
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = self._held[name] = torch.empty(count, dtype=dtype)
        assert held.dtype == dtype, name
        return held[:count].view(size)
