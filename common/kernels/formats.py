"""Numeric formats of stored KV: rows of float32 to codes and scales, and back. Pure.

fp8 and int8 have one scale per row (a token of one KV head), in bf16, chosen so that the row's
largest magnitude meets the largest code; codes are computed with the *rounded* scale, round to
even, and saturate. A row of zeros has scale 1. int4 has a scale and a least number, both bf16, for
each group of `block.code_group` numbers: a number is code times scale plus the least number,
codes are 0 … 15, and the group's greatest number meets 15. bf16 has no scale.

Codes are the nearest ones, number by number, or, with `carry`, one number after the other: what a
number loses is taken off those after it, times what `carry` says (`model/key_terms.py` says why).

It knows nothing of blocks and offsets, nor of rotation. Every function treats each row by itself,
with element-wise operations and a maximum only: a row's codes don't depend on its company.
"""

from __future__ import annotations

from typing import assert_never

import torch

from kvass.common.block import KvDtype, code_group

E4M3_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 15.0
LARGEST_CODE = 480.0  # no code of a format with scales reads as more
CODE_DTYPES: dict[KvDtype, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,  # two in each
    "bf16": torch.bfloat16,
}
# An e4m3 code shifted into a float16's bits reads as its value times 2**-8: both have the sign
# first, and the exponent biases are 7 and 15. Subnormal codes become subnormal halves, so this is
# exact.
_E4M3_SHIFT = 7
_E4M3_MASK = -(1 << 14) - 1  # all bits but the top exponent bit, where the sign was extended into
_E4M3_FACTOR = 256.0


def encode(
    rows: torch.Tensor, kv_dtype: KvDtype, carry: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantise float32 rows [..., H, D]: codes of `CODE_DTYPES`, [..., H, D] or, of int4,
    [..., H, D / 2], and scales bf16 [..., H, parts]. `carry` is float32 [H, D, D]."""
    assert rows.dtype == torch.float32, rows.dtype
    if kv_dtype == "bf16":
        return rows.to(torch.bfloat16), None
    scales, least = _scales_of(rows, kv_dtype)
    group = code_group(kv_dtype, rows.shape[-1])
    step, base = (each.float().repeat_interleave(group, -1) for each in (scales, least))
    if carry is None:
        ratios = _nearest((rows - base) / step, kv_dtype)
    else:
        ratios = _nearest_in_turn(rows, step, base, carry, kv_dtype)
    codes = ratios.to(CODE_DTYPES[kv_dtype])
    if kv_dtype != "int4":
        return codes, scales
    return codes[..., 0::2] | codes[..., 1::2] << 4, torch.cat([scales, least], -1)


def _scales_of(rows: torch.Tensor, kv_dtype: KvDtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales bf16 [..., groups], and what is coded as 0."""
    if kv_dtype != "int4":
        code_max = E4M3_MAX if kv_dtype == "fp8" else INT8_MAX
        scales = _scale_or_one(rows.abs().amax(-1, keepdim=True) / code_max)
        return scales, torch.zeros_like(scales)
    groups = rows.reshape(*rows.shape[:-1], -1, code_group(kv_dtype, rows.shape[-1]))
    # Adding 0 makes -0 into 0: which of them is the least is nobody's to say.
    least = groups.amin(-1).add_(0.0).to(torch.bfloat16)
    return _scale_or_one((groups.amax(-1) - least.float()) / INT4_MAX), least


def _scale_or_one(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to bf16. Rows of equal numbers, and of such whose scale rounds to 0, have 1."""
    rounded = scales.to(torch.bfloat16)
    return rounded.masked_fill_(rounded <= 0, 1.0)


def _nearest(ratios: torch.Tensor, kv_dtype: KvDtype) -> torch.Tensor:
    """Return the nearest numbers that codes stand for, float32; `ratios` are changed."""
    match kv_dtype:
        case "fp8":
            return ratios.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
        case "int8":
            return ratios.clamp_(-INT8_MAX, INT8_MAX).round_()
        case "int4":
            return ratios.clamp_(0.0, INT4_MAX).round_()
        case "bf16":
            return ratios.to(torch.bfloat16).float()
        case _:
            assert_never(kv_dtype)


def _nearest_in_turn(
    rows: torch.Tensor, step: torch.Tensor, base: torch.Tensor, carry: torch.Tensor, to: KvDtype
) -> torch.Tensor:
    left, ratios = rows.clone(), torch.empty_like(rows)
    for i in range(rows.shape[-1]):
        number, size, least = left[..., i], step[..., i], base[..., i]
        ratios[..., i] = _nearest((number - least) / size, to)
        lost = number - (ratios[..., i] * size + least)
        left[..., i + 1 :] -= lost.unsqueeze(-1) * carry[:, i, i + 1 :]
    return ratios


def decode(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 values [..., D] of what `encode` returns. Exact for every finite code of
    fp8 and int8; a sum of int4 is rounded once."""
    if scales is None or codes.dtype != torch.uint8:
        values = codes.to(torch.float32)
        return values if scales is None else values * scales.to(torch.float32)
    out = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1])
    _decode_groups(out, codes, scales.to(torch.float32), torch.empty_like(codes))
    return out


def decode_into(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write the values of codes (any strides) but bf16's into `out`, float32 [..., D], contiguous.

    `scales` are float32 [..., parts] and are changed. `scratch` is int16 of out's shape. Equal to
    `decode` for every finite code and several times faster for fp8 (measured: torch converts
    196,608 codes in 0.20 ms, a table in 0.15 ms, this in 0.04 ms). An e4m3 NaN reads as 480.
    """
    if codes.dtype == torch.uint8:
        _decode_groups(out, codes, scales, scratch.view(torch.uint8)[..., : codes.shape[-1]])
        return
    if codes.dtype == torch.float8_e4m3fn:
        scratch.copy_(codes.view(torch.int8))
        scratch.bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_MASK)
        out.copy_(scratch.view(torch.float16))
        scales.mul_(_E4M3_FACTOR)
    else:
        out.copy_(codes)
    out.mul_(scales)


def _decode_groups(
    out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, halves: torch.Tensor
) -> None:
    """Decode int4; `halves` is room for codes. A code times its scale is exact in float32."""
    out[..., 0::2].copy_(torch.bitwise_and(codes, 15, out=halves))
    out[..., 1::2].copy_(torch.bitwise_right_shift(codes, 4, out=halves))
    groups = out.view(*scales.shape[:-1], scales.shape[-1] // 2, -1)
    scale, least = scales.unsqueeze(-1).chunk(2, dim=-2)
    groups.mul_(scale).add_(least)
