"""What a weight is executed as: bf16, or codes of fewer bits with scales, which become bf16 again.

This is the definition; the compiled products (native/src/panels.h) make the same values in
registers, and where there are none torch multiplies by `executed`'s. So everything that multiplies
agrees on every value, and prefill and decode on every bit.

int8: 32 inputs of one output share a scale, their greatest magnitude over 127, in bf16; a code is
the nearest of -127 … 127, ties to even; a value is code times scale, rounded to bf16 once, since
the product is exact in float32. A scale that float32 has no normal number for is zero, and so are
its codes: the compiled products know no denormal numbers.

int4: 32 inputs of one output share a least weight and a scale, a fifteenth of what the greatest is
above it, both in fp16; a code is the nearest of 0 … 15, ties to even; a value is code times scale,
exact in float32, plus the least weight, rounded to float32 and then to bf16. These are the codes of
GGUF's Q4_1: a matrix that came from one has its values again, all but a few. The logits' matrix is
int8: with 4 bits it loses more than all others together.

It refuses to know where codes lie in memory (`packed.py` does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F

from kvass.common.kernels.numerics import WeightFormat

GROUP = 32  # inputs; as in panels.h, and said in numerics.py
_CODE_MAX, _HALF_CODE_MAX = 127, 15


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes int8 [outputs, groups, 32], zero beyond `inputs`; scales bf16 [outputs, groups]."""

    inputs: int
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Coded:
        """Code a bf16 weight [outputs, inputs]."""
        assert weight.dtype == torch.bfloat16
        outputs, inputs = weight.shape
        groups = F.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP).float()
        scales = (groups.abs().amax(-1) / _CODE_MAX).to(torch.bfloat16)
        scales = scales.where(scales >= torch.finfo(torch.float32).tiny, 0)
        inverse_of = scales.float().where(scales > 0, torch.inf)
        codes = (groups / inverse_of[..., None]).round_().clamp_(-_CODE_MAX, _CODE_MAX)
        return cls(inputs, codes.to(torch.int8), scales)

    def values(self) -> torch.Tensor:
        """Return what is multiplied by: bf16 [outputs, inputs]."""
        wide = self.codes.float().mul_(self.scales.float()[..., None])
        return wide.to(torch.bfloat16).flatten(1)[:, : self.inputs].contiguous()


@dataclass(frozen=True, slots=True)
class Halved:
    """Codes uint8 0 … 15 [outputs, groups, 32]; scales and least weights fp16 [outputs, groups].

    Beyond `inputs` codes are the last input's, and are multiplied by zero or not at all.
    """

    inputs: int
    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Halved:
        """Code a bf16 weight [outputs, inputs]."""
        assert weight.dtype == torch.bfloat16
        outputs, inputs = weight.shape
        last = weight[:, -1:].expand(-1, -inputs % GROUP)  # a zero might be the least
        groups = torch.cat([weight, last], 1).view(outputs, -1, GROUP).float()
        lowest, highest = groups.aminmax(dim=-1)
        scales = ((highest - lowest) / _HALF_CODE_MAX).to(torch.float16)
        least = lowest.to(torch.float16)
        inverse_of = scales.float().where(scales > 0, torch.inf)
        codes = ((groups - least.float()[..., None]) / inverse_of[..., None]).round_()
        return cls(inputs, codes.clamp_(0, _HALF_CODE_MAX).to(torch.uint8), scales, least)

    def values(self) -> torch.Tensor:
        """Return what is multiplied by: bf16 [outputs, inputs]."""
        wide = self.codes.float().mul_(self.scales.float()[..., None])
        wide += self.least.float()[..., None]
        return wide.to(torch.bfloat16).flatten(1)[:, : self.inputs].contiguous()


def executed(weight: torch.Tensor, weights: WeightFormat) -> torch.Tensor:
    """Return the bf16 values that are multiplied by in place of this bf16 weight."""
    match weights:
        case "bf16" | "native":
            return weight
        case "int8":
            return Coded.of(weight).values()
        case "int4":
            return Halved.of(weight).values()
        case _:
            assert_never(weights)
