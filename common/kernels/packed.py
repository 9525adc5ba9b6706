"""Products with weights that were packed once, by the compiled library.

A weight is kept as bf16, or as codes that become bf16 on their way: ours (`weight_formats.py`), or
a GGUF file's own (`gguf_blocks.py`). It lies in the order in which the library reads it
(`block_panels.py`) and in no other: with few rows a product takes as long as memory
takes to bring its weights, and with many as long as the arithmetic. One sum has one order, whatever
is computed beside it and whatever the weight is kept as (native/src/products.cpp), so a row's bits
do not depend on the number of rows or threads.

Measured in the default model's shapes, beside torch's products in one run (benchmarks/engine.py):
with one row 34 GB/s of weights on one thread (torch 14; memory gives 37) and 40 on two (torch 20);
with 512 rows 950 GFLOP/s on two (torch 870). Pages of 2 MiB: 6 to 14 % less time with few rows.

It refuses to know of machines without bf16 dot products: there torch's products are faster.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from kvass.common.kernels import block_panels
from kvass.common.kernels.block_panels import PANEL
from kvass.common.kernels.gguf_blocks import BlockKind, Blocks
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.weight_formats import Coded, Halved
from kvass.common.native import library
from kvass.common.pages import private_pages

LEVEL = "avx512bf16"  # the only one that it is compiled for
# As in products.cpp. Q4_1 is what int4 is, with the file's codes.
_NUMBERS: dict[WeightFormat | BlockKind, int] = {
    **{"bf16": 0, "int8": 1, "int4": 2},
    **{"Q4_1": 2, "Q8_0": 3, "Q4_0": 4, "Q4_K": 5, "Q6_K": 6, "Q5_0": 7, "Q5_1": 8, "Q5_K": 9},
}
_PIECE = 128 << 20  # mapped at once; what is not written takes no memory


def available() -> bool:
    """Say whether this process can multiply by packed weights."""
    return library.level() == LEVEL


@dataclass(slots=True)
class HugePages:
    """Memory for what stays: pages of 2 MiB, where the system has them. A piece goes back to the
    machine with the last weight in it.

    Mutable fields: `_room`, what is mapped and not taken yet.
    """

    _room: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def take(self, size: int) -> torch.Tensor:
        """Return room for so many bytes, at a multiple of 64."""
        size += -size % 64
        if size > len(self._room):
            pages = private_pages(max(size, _PIECE))
            self._room = torch.frombuffer(pages.view, dtype=torch.uint8)  # keeps the mapping
        taken, self._room = self._room[:size], self._room[size:]
        return taken


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] in panels of 32 outputs, and its bias in float32."""

    outputs: int
    inputs: int
    panels: torch.Tensor
    bias: torch.Tensor | None
    threads: int
    format: WeightFormat | BlockKind = "bf16"

    @classmethod
    def of(
        cls,
        weight: torch.Tensor | Blocks,
        bias: torch.Tensor | None,
        threads: int,
        pages: HugePages,
        format: WeightFormat = "bf16",
    ) -> PackedWeight:
        """Pack a copy of bf16 `weight`, as `format`, or of blocks, as they are; outputs and inputs
        that fill a panel up are zero."""
        outputs, inputs = weight.shape
        more = -outputs % PANEL
        if bias is not None:
            bias = F.pad(bias.float(), (0, more))
        if isinstance(weight, Blocks):
            panels, kept_as = block_panels.of_blocks(weight), weight.kind
            return cls(outputs, inputs, _kept(panels, pages), bias, threads, kept_as)
        assert weight.dtype == torch.bfloat16
        if more:
            weight = F.pad(weight, (0, 0, 0, more))
        if format == "int8":
            panels = block_panels.of_int8(Coded.of(weight))
        elif format == "int4":
            panels = block_panels.of_int4(Halved.of(weight))
        else:
            panels, format = block_panels.pairs(F.pad(weight, (0, inputs % 2))), "bf16"
        return cls(outputs, inputs, _kept(panels, pages), bias, threads, format)

    @property
    def number(self) -> int:
        """The library's number of the format."""
        return _NUMBERS[self.format]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return bf16 rows [N, inputs] times the weight, plus the bias, rounded to bf16 once."""
        return self._product(rows, torch.bfloat16)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same in float32, as it was summed."""
        return self._product(rows, torch.float32)

    def _product(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert rows.dtype == torch.bfloat16 and rows.shape[1] == self.inputs
        rows, count = rows.contiguous(), rows.shape[0]
        out = torch.empty(count, self.outputs, dtype=dtype)
        _multiply()(
            self.threads,
            rows.data_ptr(),
            count,
            self.inputs,
            self.number,
            self.panels.data_ptr(),
            self.outputs,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            dtype == torch.bfloat16,
        )
        return out


def _kept(panels: torch.Tensor, pages: HugePages) -> torch.Tensor:
    """Return a copy in pages of 2 MiB."""
    room = pages.take(panels.nbytes).view(panels.dtype)
    return room[: panels.numel()].view(panels.shape).copy_(panels)


@functools.cache
def _multiply() -> Callable[..., Any]:
    number, address = ctypes.c_int64, ctypes.c_void_p
    rows = (ctypes.c_int, address, number, number)
    arguments = (*rows, ctypes.c_int, address, number, address, address, ctypes.c_int)
    return library.function_at("kvass_multiply", LEVEL, None, *arguments)
