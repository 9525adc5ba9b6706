"""Products with weights that were packed once, by the compiled library.

A weight is kept as bf16, or as codes that become bf16 on their way (`weight_formats.py`), in the
order in which the library reads it and in no other: with few rows a product takes as long as memory
takes to bring its weights, and with many as long as the arithmetic. One sum has one order, whatever
is computed beside it and whatever the weight is kept as (native/src/products.cpp), so a row's bits
do not depend on the number of rows or threads.

Measured in the default model's shapes, beside torch's products in one run (benchmarks/engine.py):
with one row 34 GB/s of weights on one thread (torch 14; memory gives 37) and 40 on two (torch 20);
with 512 rows 950 GFLOP/s on two (torch 870). Pages of 2 MiB: 6 to 14 % less time with few rows.

It refuses to know of machines without bf16 dot products: there torch's products are faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

import torch
import torch.nn.functional as F

from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.weight_formats import GROUP, Coded, Halved
from kvass.common.native import library

LEVEL = "avx512bf16"  # the only one that it is compiled for
PANEL = 32  # outputs; as in panels.h
_NUMBERS: dict[WeightFormat, int] = {"bf16": 0, "int8": 1, "int4": 2}  # as in products.cpp
_HUGE = 2 << 20
_PIECE = 128 << 20  # mapped at once; what is not written takes no memory


def available() -> bool:
    """Say whether this process can multiply by packed weights."""
    return library.level() == LEVEL


@dataclass(slots=True)
class HugePages:
    """Memory for what stays: pages of 2 MiB, where the system has them. Nothing is given back.

    Mutable fields: `_room`, what is mapped and not taken yet.
    """

    _room: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bfloat16))

    def take(self, values: int) -> torch.Tensor:
        """Return room for so many bf16 values, at a multiple of 64 bytes."""
        values += -values % 32
        if values > len(self._room):
            self._room = _mapped(max(2 * values, _PIECE))
        taken, self._room = self._room[:values], self._room[values:]
        return taken


def _mapped(size: int) -> torch.Tensor:
    room = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(room, dtype=torch.bfloat16)  # keeps the mapping
    return values[-values.data_ptr() % _HUGE // 2 :]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [outputs, inputs] in panels of 32 outputs, and its bias in float32."""

    outputs: int
    inputs: int
    panels: torch.Tensor
    bias: torch.Tensor | None
    threads: int
    format: WeightFormat = "bf16"

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        threads: int,
        pages: HugePages,
        format: WeightFormat = "bf16",
    ) -> PackedWeight:
        """Pack a copy of bf16 `weight`; outputs and inputs that fill a panel up are zero."""
        assert weight.dtype == torch.bfloat16
        outputs, inputs = weight.shape
        more = -outputs % PANEL
        if more:
            weight = F.pad(weight, (0, 0, 0, more))
        match format:
            case "bf16":
                panels = _kept(_pairs(F.pad(weight, (0, inputs % 2))), pages)
            case "int8":
                panels = _kept(_int8_panels(Coded.of(weight)), pages)
            case "int4":
                panels = _kept(_int4_panels(Halved.of(weight)), pages)
            case _:
                assert_never(format)
        if bias is not None:
            bias = F.pad(bias.float(), (0, more))
        return cls(outputs, inputs, panels, bias, threads, format)

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
            _NUMBERS[self.format],
            self.panels.data_ptr(),
            self.outputs,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            dtype == torch.bfloat16,
        )
        return out


def _kept(panels: torch.Tensor, pages: HugePages) -> torch.Tensor:
    """Return a copy in pages of 2 MiB."""
    room = pages.take(-(-panels.nbytes // 2)).view(panels.dtype)
    return room[: panels.numel()].view(panels.shape).copy_(panels)


def _pairs(values: torch.Tensor) -> torch.Tensor:
    """Return [panels, pairs, outputs, 2] of [outputs, inputs]."""
    return values.view(-1, PANEL, values.shape[1] // 2, 2).transpose(1, 2)


def _int8_panels(coded: Coded) -> torch.Tensor:
    """Return panels uint8 [panels, bytes]: before each group's codes its scales."""
    groups = coded.scales.shape[1]
    scales = coded.scales.view(-1, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8)
    codes = _pairs(coded.codes.flatten(1)).reshape(-1, groups, GROUP * PANEL).view(torch.uint8)
    panels = torch.cat([scales, codes], -1).flatten(1)
    beyond = (groups * GROUP - coded.inputs) // 2
    return panels[:, : panels.shape[1] - beyond * 2 * PANEL]


def _int4_panels(halved: Halved) -> torch.Tensor:
    """Return panels uint8 [panels, bytes]: before a group's codes its scales and least weights."""
    groups = halved.scales.shape[1]
    before = torch.stack([halved.scales, halved.least]).view(2, -1, PANEL, groups)
    before = before.permute(1, 3, 0, 2).flatten(2).contiguous().view(torch.uint8)
    low, high = _pairs(halved.codes.flatten(1)).chunk(2, dim=2)
    codes = (low | high << 4).reshape(-1, groups, GROUP * PANEL // 2)
    panels = torch.cat([before, codes], -1).flatten(1)
    beyond = (groups * GROUP - halved.inputs) // 2
    return panels[:, : panels.shape[1] - beyond * PANEL]


@functools.cache
def _multiply() -> Callable[..., Any]:
    number, address = ctypes.c_int64, ctypes.c_void_p
    rows = (ctypes.c_int, address, number, number)
    arguments = (*rows, ctypes.c_int, address, number, address, address, ctypes.c_int)
    return library.function_at("kvass_multiply", LEVEL, None, *arguments)
