"""Products with weights that were packed once, by the compiled library.

A weight is kept in the order in which the library reads it and in no other: with few rows a product
takes as long as memory takes to bring its weights, and with many as long as the arithmetic. One
sum has one order, whatever is computed beside it (native/src/products.cpp), so a row's bits do not
depend on the number of rows or threads.

Measured with two threads, default model's shapes: 50 GB/s of weights with one row where torch's
product has 14, and 950 GFLOP/s with 512 rows where torch's has 400.

It refuses to know of machines without bf16 dot products: there torch's products are faster.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvass.common.native import library

LEVEL = "avx512bf16"  # the only one that it is compiled for
PANEL = 32  # outputs; as in products.cpp


def available() -> bool:
    """Say whether this process can multiply by packed weights."""
    return library.level() == LEVEL


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A bf16 weight [outputs, inputs] in panels of 32 outputs, and its bias in float32."""

    outputs: int
    inputs: int
    panels: torch.Tensor
    bias: torch.Tensor | None
    threads: int

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, threads: int) -> PackedWeight:
        """Pack a copy of `weight`; outputs and inputs that fill a panel up are zero."""
        assert weight.dtype == torch.bfloat16
        outputs, inputs = weight.shape
        more = -outputs % PANEL
        if more or inputs % 2:
            weight = F.pad(weight, (0, inputs % 2, 0, more))
        pairs = weight.view(-1, PANEL, weight.shape[1] // 2, 2)
        if bias is not None:
            bias = F.pad(bias.float(), (0, more))
        return cls(outputs, inputs, pairs.transpose(1, 2).contiguous(), bias, threads)

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
            self.panels.data_ptr(),
            self.outputs,
            None if self.bias is None else self.bias.data_ptr(),
            out.data_ptr(),
            dtype == torch.bfloat16,
        )
        return out


@functools.cache
def _multiply() -> Callable[..., Any]:
    number, address = ctypes.c_int64, ctypes.c_void_p
    arguments = (ctypes.c_int, address, number, number, address, number, address, address)
    return library.function_at("kvass_multiply", LEVEL, None, *arguments, ctypes.c_int)
