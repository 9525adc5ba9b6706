"""Matrices as GGUF files hold them: blocks of codes with scales, and the values they stand for.

This is the definition. A value is what ggml says, in float32: d · q (Q8_0, Q4_0, Q5_0, Q6_K, exact)
or d · q + m (Q4_1, Q5_1, Q4_K, Q5_K; the product is exact, the sum rounded once), where a K
format's d and m are a block's, fp16, times a small integer of a group's, exact. What is multiplied
by is that value rounded to bf16, as an F16 or F32 tensor's values are: by the compiled products in
registers (native/src/block_panels.h), and elsewhere by torch from a bf16 copy. So all agree on
every bit.

It refuses to know files (`model/gguf_file.py`), and where codes lie for a product
(`block_panels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from kvass.common.errors import Invalid

BlockKind = Literal["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]


@dataclass(frozen=True, slots=True)
class Parts:
    """A matrix's numbers, taken out of its blocks.

    `codes` int8 or uint8 [outputs, inputs], of which `zero` stands for zero. `scales` and `least`
    fp16 [outputs, blocks]; of the K formats each group's are these times `scale_factors` and
    `least_factors`, 8-bit integers [outputs, groups]. `least` is added, a K format's taken away.
    """

    codes: torch.Tensor
    zero: int
    scales: torch.Tensor
    least: torch.Tensor | None = None
    scale_factors: torch.Tensor | None = None
    least_factors: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return float32 [outputs, inputs]."""
        scales = _each_group(self.scales, self.scale_factors)
        codes = self.codes.view(*scales.shape, -1)
        values = codes.float()  # in place from here on: a matrix is large, and new memory slow
        if self.zero:
            values -= self.zero
        values *= scales[..., None]
        if self.least is not None:
            least = _each_group(self.least, self.least_factors)[..., None]
            values = values.add_(least) if self.least_factors is None else values.sub_(least)
        return values.flatten(1)


def _each_group(shared: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    if factors is None:
        return shared.float()
    groups = factors.view(*shared.shape, -1).float()
    return (shared.float()[..., None] * groups).flatten(1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [outputs, inputs]: the file's own bytes, uint8 [outputs, bytes of a row]."""

    kind: BlockKind
    inputs: int
    raw: torch.Tensor

    @property
    def outputs(self) -> int:
        return self.raw.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def parts(self) -> Parts:
        """Take the numbers out."""
        return _PARTS[self.kind](self._blocks())

    def checked(self, name: str) -> Blocks:
        """Return itself; raises Invalid if a scale or a least weight is no finite number."""
        for first in _HALVES[self.kind]:
            if not bool(_half(self._blocks(), first).isfinite().all()):
                raise Invalid(f"{name} holds values that are not finite")
        return self

    def _blocks(self) -> torch.Tensor:
        values, size = SIZES[self.kind]
        return self.raw.view(self.outputs, self.inputs // values, size)

    def rows(self, indices: torch.Tensor) -> Blocks:
        """Return some of its rows, in the order of `indices` int64."""
        return Blocks(self.kind, self.inputs, self.raw[indices])

    def values(self) -> torch.Tensor:
        """Return what it stands for, float32 [outputs, inputs]."""
        return self.parts().values()


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of several kinds, one below the other."""

    parts: tuple[torch.Tensor | Blocks, ...]


Matrix: TypeAlias = torch.Tensor | Blocks | Stack


def stacked(parts: Sequence[torch.Tensor | Blocks]) -> Matrix:
    """Return matrices one below the other: as one matrix where they are of one kind."""
    first, kinds = parts[0], {part.kind if isinstance(part, Blocks) else "" for part in parts}
    if len(kinds) > 1:
        return Stack(tuple(parts))
    if isinstance(first, Blocks):
        raw = [part.raw for part in parts if isinstance(part, Blocks)]
        return Blocks(first.kind, first.inputs, torch.cat(raw))
    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])


def bf16_of(matrix: Matrix) -> torch.Tensor:
    """Return what is multiplied by; a tensor, of whatever dtype, as it is."""
    match matrix:
        case Blocks():
            return matrix.values().to(torch.bfloat16)
        case Stack():
            return torch.cat([bf16_of(part) for part in matrix.parts])
        case _:
            return matrix


def _half(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Return fp16 [outputs, blocks] that stand at a byte of every block."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16)[..., 0]


def _half_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Return low halves, then high ones, of the last dimension."""
    return torch.cat([codes & 15, codes >> 4], -1)


def _q8_0(blocks: torch.Tensor) -> Parts:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Parts(codes.flatten(1), 0, _half(blocks, 0))


def _q4_0(blocks: torch.Tensor) -> Parts:
    return Parts(_half_bytes(blocks[..., 2:]).flatten(1), 8, _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Parts:
    codes = _half_bytes(blocks[..., 4:]).flatten(1)
    return Parts(codes, 0, _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return 16 where a bit is set: uint8, the last dimension eight times as long."""
    return (bits[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _half_bytes(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Parts(codes.flatten(1), 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _half_bytes(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Parts(codes.flatten(1), 0, _half(blocks, 0), _half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> Parts:
    codes = _half_bytes(blocks[..., 16:].view(*blocks.shape[:2], 4, 32))
    return _of_super_blocks(blocks, codes)


def _q5_k(blocks: torch.Tensor) -> Parts:
    """Byte i has the fifth bits of the i-th codes of the eight groups."""
    bits = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    codes = _half_bytes(blocks[..., 48:].view(*blocks.shape[:2], 4, 32))
    return _of_super_blocks(blocks, codes.flatten(2) | bits.flatten(2) << 4)


def _of_super_blocks(blocks: torch.Tensor, codes: torch.Tensor) -> Parts:
    """Eight groups a block: their factors have 6 bits, of the last four in two pieces."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale_factors = torch.cat([low & 63, (high & 15) | (low >> 6) << 4], -1)
    least_factors = torch.cat([middle & 63, high >> 4 | (middle >> 6) << 4], -1)
    return Parts(
        *(codes.flatten(1), 0, _half(blocks, 0), _half(blocks, 2)),
        *(scale_factors.flatten(1), least_factors.flatten(1)),
    )


def _q6_k(blocks: torch.Tensor) -> Parts:
    """Two halves a block: 64 bytes of low half bytes, 32 bytes of four times two high bits."""
    low = _half_bytes(blocks[..., :128].view(*blocks.shape[:2], 2, 64))
    bits = blocks[..., 128:192].view(*blocks.shape[:2], 2, 32)
    high = torch.cat([bits >> 2 * place & 3 for place in range(4)], -1)
    factors = blocks[..., 192:208].contiguous().view(torch.int8)
    codes = (low | high << 4).flatten(1)
    return Parts(codes, 32, _half(blocks, 208), scale_factors=factors.flatten(1))


# Inputs that share a block, and its bytes.
SIZES: dict[BlockKind, tuple[int, int]] = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
# Where a block's scale and least weight are, fp16.
_HALVES: dict[BlockKind, tuple[int, ...]] = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}
_PARTS: dict[BlockKind, Callable[[torch.Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
