"""The small operations between products, by the compiled library: one call each, one pass each.

For bf16 models. With one row an operation of torch costs its call and nothing else, and a norm is
five of them. `model/layers.py` has the same in torch, for machines and models without.

Each has one order of sums and one exponential at each level of instructions
(native/src/rows.cpp); levels differ in their last bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from kvass.common.native import library

_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
NORM = (ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS, ctypes.c_float, _ADDRESS, _NUMBER, _NUMBER)
GATE = (ctypes.c_int, _ADDRESS, _ADDRESS, _NUMBER, _NUMBER)


def available() -> bool:
    """Say whether this process has them."""
    return library.level() is not None


def norm(
    rows: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    threads: int,
) -> torch.Tensor:
    """Add bf16 `addend` to float32 `rows` [N, width] in place and return their norm in bf16."""
    assert rows.dtype == torch.float32 and weight.dtype == torch.bfloat16
    assert rows.is_contiguous() and weight.shape == rows.shape[1:]
    if addend is not None:
        assert addend.dtype == torch.bfloat16 and addend.shape == rows.shape
        addend = addend.contiguous()
    count, width = rows.shape
    out = torch.empty(count, width, dtype=torch.bfloat16)
    _norm()(
        threads,
        rows.data_ptr(),
        None if addend is None else addend.data_ptr(),
        weight.data_ptr(),
        epsilon,
        out.data_ptr(),
        count,
        width,
    )
    return out


def gate(gate_up: torch.Tensor, threads: int) -> torch.Tensor:
    """Return silu(gate) · up of bf16 rows [N, gate ‖ up]."""
    assert gate_up.dtype == torch.bfloat16
    gate_up, count, width = gate_up.contiguous(), gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(count, width, dtype=torch.bfloat16)
    _gate()(threads, gate_up.data_ptr(), out.data_ptr(), count, width)
    return out


@functools.cache
def _norm() -> Callable[..., Any]:
    return _function("kvass_norm", *NORM)


@functools.cache
def _gate() -> Callable[..., Any]:
    return _function("kvass_gate", *GATE)


def _function(name: str, *arguments: Any) -> Callable[..., Any]:
    found = library.function(name, None, *arguments)
    assert found is not None, "the caller asks `available` first"
    return found
