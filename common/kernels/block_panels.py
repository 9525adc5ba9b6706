"""A weight's codes, dealt out into panels of 32 outputs as the compiled products read them.

What lies where is said in native/src/panels.h and block_panels.h; what the codes are worth in
weight_formats.py and gguf_blocks.py. Nothing is rounded here: scales keep their format.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvass.common.kernels.gguf_blocks import BlockKind, Blocks
from kvass.common.kernels.weight_formats import GROUP, Coded, Halved

PANEL = 32  # outputs; as in panels.h
# Of a code.
_BITS: dict[BlockKind, int] = {
    **{"Q8_0": 8, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
}


def pairs(values: torch.Tensor) -> torch.Tensor:
    """Return [panels, pairs, outputs, 2] of [outputs, inputs]."""
    return values.view(-1, PANEL, values.shape[1] // 2, 2).transpose(1, 2)


def of_int8(coded: Coded) -> torch.Tensor:
    """Return panels uint8 [panels, bytes]: before each group's codes its scales."""
    panels = _joined([_shared(coded.scales), _bytes(coded.codes.flatten(1), GROUP)])
    beyond = (coded.scales.shape[1] * GROUP - coded.inputs) // 2
    return panels[:, : panels.shape[1] - beyond * 2 * PANEL]


def of_int4(halved: Halved) -> torch.Tensor:
    """Return panels uint8 [panels, bytes]: before a group's codes its scales and least weights."""
    shared = [_shared(halved.scales), _shared(halved.least)]
    panels = _joined([*shared, _half_bytes(halved.codes.flatten(1), GROUP)])
    beyond = (halved.scales.shape[1] * GROUP - halved.inputs) // 2
    return panels[:, : panels.shape[1] - beyond * PANEL]


def of_blocks(blocks: Blocks) -> torch.Tensor:
    """Return panels uint8 [panels, bytes] of what a GGUF file holds; outputs fill panels up."""
    raw = F.pad(blocks.raw, (0, 0, 0, -blocks.outputs % PANEL))
    parts = Blocks(blocks.kind, blocks.inputs, raw).parts()
    shared = [_shared(each) for each in (parts.scales, parts.least) if each is not None]
    factors = [
        _shared(each) for each in (parts.scale_factors, parts.least_factors) if each is not None
    ]
    groups, supers = (factors or shared)[0].shape[1], shared[0].shape[1]
    codes = _codes(parts.codes, _BITS[blocks.kind], blocks.inputs // groups)
    grouped = torch.cat([*factors, codes], -1)
    return _joined([*shared, grouped.view(len(grouped), supers, -1)])


def _codes(codes: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    """Return codes [panels, groups, bytes], `inputs` a group; high bits follow each pair's."""
    if bits == 8:
        return _bytes(codes, inputs)
    low = _half_bytes(codes & 15, inputs)
    if bits == 4:
        return low
    high = (_single_bits if bits == 5 else _two_bits)(codes >> 4, inputs)
    by_pair = [each.view(*each.shape[:2], inputs // 2, -1) for each in (low, high)]
    return torch.cat(by_pair, -1).flatten(2)


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Return panels of pieces uint8 [panels, groups, bytes], which lie side by side in a group."""
    return torch.cat(pieces, -1).flatten(1)


def _shared(values: torch.Tensor) -> torch.Tensor:
    """Return bytes [panels, groups, bytes] of what each group of an output has one of."""
    panels = values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()
    return panels.view(torch.uint8)


def _bytes(codes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return codes of 8 bits [panels, groups, bytes], `inputs` a group."""
    dealt = pairs(codes).reshape(len(codes) // PANEL, -1, inputs * PANEL)
    return dealt.view(torch.uint8)


def _half_bytes(codes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return codes of 4 bits: those of the other 16 outputs are the high halves."""
    low, high = pairs(codes).chunk(2, dim=2)
    return (low | high << 4).reshape(len(codes) // PANEL, -1, inputs * PANEL // 2)


def _two_bits(codes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return codes of 2 bits: a byte has one of each eight outputs."""
    four = pairs(codes).chunk(4, dim=2)
    packed = four[0] | four[1] << 2 | four[2] << 4 | four[3] << 6
    return packed.reshape(len(codes) // PANEL, -1, inputs * PANEL // 4)


def _single_bits(codes: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return codes of 1 bit: in order, the first one is a byte's lowest."""
    eight = pairs(codes).reshape(len(codes) // PANEL, codes.shape[1] // inputs, -1, 8)
    return (eight << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
