"""Numeric formats of stored KV: rows of float32 to codes and scales, and back. Pure.

One scale per row (a token of one KV head), in bf16, chosen so that the row's largest magnitude
meets the largest code; codes are computed with the *rounded* scale, round to even, and saturate. A
row of zeros has scale 1. bf16 has no scale.

It knows nothing of blocks and offsets, nor of rotation. Every function treats each row by itself,
with element-wise operations and a maximum only: a row's codes don't depend on its company.
"""

from __future__ import annotations

from typing import assert_never

import torch

from kvass.common.block import KvDtype

E4M3_MAX = 448.0
INT8_MAX = 127.0
LARGEST_CODE = 480.0  # no code of a format with scales reads as more
CODE_DTYPES: dict[KvDtype, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "bf16": torch.bfloat16,
}
# An e4m3 code shifted into a float16's bits reads as its value times 2**-8: both have the sign
# first, and the exponent biases are 7 and 15. Subnormal codes become subnormal halves, so this is
# exact.
_E4M3_SHIFT = 7
_E4M3_MASK = -(1 << 14) - 1  # all bits but the top exponent bit, where the sign was extended into
_E4M3_FACTOR = 256.0


def encode(rows: torch.Tensor, kv_dtype: KvDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise float32 rows [..., D] to codes [..., D] (`CODE_DTYPES`) and bf16 scales [...]."""
    assert rows.dtype == torch.float32, rows.dtype
    match kv_dtype:
        case "bf16":
            return rows.to(torch.bfloat16), None
        case "fp8":
            ratios, scales = _scaled(rows, E4M3_MAX)
            return ratios.to(torch.float8_e4m3fn), scales
        case "int8":
            ratios, scales = _scaled(rows, INT8_MAX)
            return ratios.round_().to(torch.int8), scales
        case _:
            assert_never(kv_dtype)


def _scaled(rows: torch.Tensor, code_max: float) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (rows.abs().amax(-1) / code_max).to(torch.bfloat16)
    # Zero rows, and rows so small that their scale rounds to zero.
    scales.masked_fill_(scales == 0, 1.0)
    ratios = rows / scales.to(torch.float32).unsqueeze(-1)
    return ratios.clamp_(-code_max, code_max), scales


def decode(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 values of codes [..., D] and scales [...]; exact for every finite code."""
    values = codes.to(torch.float32)
    return values if scales is None else values * scales.to(torch.float32).unsqueeze(-1)


def decode_into(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write the values of fp8 or int8 codes [..., D] (any strides) into `out`, float32, contiguous.

    `scales` are float32 [...] and are changed. `scratch` is int16 of out's shape. Equal to `decode`
    for every finite code and several times faster for fp8 (measured: torch converts 196,608 codes
    in 0.20 ms, a table in 0.15 ms, this in 0.04 ms). An e4m3 NaN reads as 480.
    """
    if codes.dtype == torch.float8_e4m3fn:
        scratch.copy_(codes.view(torch.int8))
        scratch.bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
        out.copy_(scratch.view(torch.float16))
        scales.mul_(_E4M3_FACTOR)
    else:
        out.copy_(codes)
    out.mul_(scales.unsqueeze(-1))
