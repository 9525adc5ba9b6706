"""Number formats and rotation: what a row becomes, alone or in company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.common.block import KV_DTYPES, KvDtype, code_group
from kvass.common.kernels.formats import CODE_DTYPES, decode, decode_into, encode
from kvass.common.kernels.rotation import ROW_TILE, hadamard, multiply_rows

SCALED: tuple[KvDtype, ...] = ("fp8", "int8")
INTEGERS_AND_FP8: tuple[KvDtype, ...] = (*SCALED, "int4")


def table(kv_dtype: KvDtype) -> torch.Tensor:
    """All finite values of a format with scales, ascending, in double precision."""
    if kv_dtype == "int8":
        return torch.arange(-127, 128, dtype=torch.float64)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    return codes[torch.isfinite(codes)].sort().values


def random_rows(seed: int, rows: int, depth: int) -> torch.Tensor:
    """Rows of very different sizes, with outliers, zeros and whole rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, depth, generator=generator)
    values *= torch.exp(4 * torch.randn(rows, 1, generator=generator))
    values[:, seed % depth] *= 50
    values[torch.rand(rows, depth, generator=generator) < 0.1] = 0
    values[seed % rows] = 0
    return values


@given(st.integers(0, 2**31), st.sampled_from(SCALED))
@settings(max_examples=40, deadline=None)
def test_codes_are_the_nearest_by_the_stored_scale(seed: int, kv_dtype: KvDtype) -> None:
    rows = random_rows(seed, 5, 16)
    codes, scales = encode(rows, kv_dtype)
    assert scales is not None and scales.dtype == torch.bfloat16
    assert codes.dtype == CODE_DTYPES[kv_dtype]
    values = table(kv_dtype)
    ratios = rows.double() / scales.double()
    best = (ratios.unsqueeze(-1) - values).abs().amin(-1)
    got = (ratios - codes.to(torch.float64)).abs()
    # The quotient is rounded to float32 first, so a tie may be decided by that.
    assert torch.all(got <= best + ratios.abs() * 2**-23)
    largest = rows.abs().amax(-1)
    expected = (largest / values[-1].item()).to(torch.bfloat16)
    expected[largest == 0] = 1
    assert torch.equal(scales[:, 0], expected)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Return int4 codes one by one, from the definition: the first of two in the low half."""
    return torch.stack([codes % 16, codes // 16], -1).flatten(-2)


@given(st.integers(0, 2**31), st.sampled_from([16, 32, 64, 80, 96]))
@settings(max_examples=60, deadline=None)
def test_int4_codes_are_the_nearest_by_the_stored_scale_and_least(seed: int, depth: int) -> None:
    rows = random_rows(seed, 5, depth)
    rows[(seed + 1) % 5] += 100 * rows.abs().max()  # far from zero: all share some digits
    codes, scales = encode(rows, "int4")
    group = code_group("int4", depth)
    assert scales is not None and scales.dtype == torch.bfloat16
    assert codes.dtype == torch.uint8 and codes.shape == (5, depth // 2)
    assert scales.shape == (5, 2 * depth // group)
    scale, least = scales.double().chunk(2, dim=-1)
    groups = rows.view(5, -1, group)
    assert torch.equal(least, (groups.amin(-1) + 0.0).to(torch.bfloat16).double())
    spread = groups.amax(-1) - least.float()
    wanted = (spread / 15).to(torch.bfloat16)
    assert torch.equal(scale, torch.where(wanted > 0, wanted, 1).double())
    ratios = (groups.double() - least[..., None]) / scale[..., None]
    best = (ratios[..., None] - torch.arange(16)).abs().amin(-1)
    got = (ratios - unpacked(codes).view(5, -1, group)).abs()
    assert torch.all(got <= best + ratios.abs() * 2**-22)
    values = unpacked(codes).view(5, -1, group) * scale[..., None] + least[..., None]
    assert torch.equal(decode(codes, scales), values.float().view(5, depth))


@given(st.integers(0, 2**31), st.sampled_from([16, 64, 80]))
@settings(max_examples=40, deadline=None)
def test_every_int4_code_is_decoded_alike_from_any_strides(seed: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (3, 4, depth // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randn(3, 4, 2 * depth // code_group("int4", depth), generator=generator)
    scales = scales.to(torch.bfloat16)
    out, scratch = torch.empty(4, 3, depth), torch.empty(4, 3, depth, dtype=torch.int16)
    decode_into(out, codes.transpose(0, 1), scales.transpose(0, 1).float().clone(), scratch)
    assert torch.equal(out, decode(codes, scales).transpose(0, 1))


def test_int4_of_equal_tiny_and_large_numbers() -> None:
    rows = torch.zeros(4, 32)
    rows[1] = 3.7
    rows[2] = 1e-44
    rows[3, 0] = -1e38
    codes, scales = encode(rows, "int4")
    assert scales is not None
    assert scales[:3, 0].tolist() == [1, 1, 1] and not codes[:3].any()
    values = decode(codes, scales)
    assert torch.equal(values[1], rows[1].to(torch.bfloat16).float())
    assert torch.equal(values[0], rows[0]) and bool(torch.isfinite(values).all())


@pytest.mark.parametrize("kv_dtype", SCALED)
def test_zero_and_tiny_rows_have_scale_one_and_large_ones_saturate(kv_dtype: KvDtype) -> None:
    rows = torch.zeros(4, 8)
    rows[1] = 1e-44
    rows[2, :2] = torch.tensor([1.0, -1.0])
    rows[3, 0] = 3e38
    codes, scales = encode(rows, kv_dtype)
    assert scales is not None
    values = decode(codes, scales)
    assert scales[:2].tolist() == [[1], [1]] and torch.equal(values[:2], torch.zeros(2, 8))
    assert codes[2, :2].to(torch.float32).tolist() == [table(kv_dtype)[-1], -table(kv_dtype)[-1]]
    assert bool(torch.isfinite(values).all())


def test_ties_go_to_even() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert encode(rows, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2]]
    rows = torch.tensor([[0.0, 15, 0.5, 1.5, 2.5, 14.5] + 10 * [4.0]])
    assert unpacked(encode(rows, "int4")[0])[0, :6].tolist() == [0, 15, 0, 2, 2, 14]
    rows = torch.tensor([[448.0, 17.0, 19.0, 21.0, -17.0, -19.0]])  # e4m3 steps by 2 from 16 to 32
    assert encode(rows, "fp8")[0].to(torch.float32).tolist() == [[448, 16, 20, 20, -16, -20]]


@given(st.integers(0, 2**31), st.sampled_from(KV_DTYPES), st.integers(1, 6), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_a_row_has_the_same_codes_alone(
    seed: int, kv_dtype: KvDtype, count: int, first: int
) -> None:
    rows = random_rows(seed, 12, 48)
    codes, scales = encode(rows, kv_dtype)
    part = slice(first, first + count)
    few, few_scales = encode(rows[part], kv_dtype)
    assert torch.equal(few.view(torch.uint8), codes[part].view(torch.uint8))
    assert (scales is None) == (few_scales is None)
    if scales is not None and few_scales is not None:
        assert torch.equal(few_scales, scales[part])


def test_every_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    sizes = torch.tensor([2.0**-40, 0.013, 0.75, 1, 1.5, 3, 1000, 2.0**40])
    scales = sizes.to(torch.bfloat16)[:, None]
    for kv_dtype in SCALED:
        stored = codes.view(CODE_DTYPES[kv_dtype])
        expected = stored.to(torch.float64) * scales.to(torch.float64)
        finite = torch.isfinite(expected)
        out, scratch = torch.empty(8, 32), torch.empty(8, 32, dtype=torch.int16)
        decode_into(out, stored, scales.to(torch.float32), scratch)
        assert torch.equal(out[finite].to(torch.float64), expected[finite])
        assert torch.equal(out[finite], decode(stored, scales)[finite])
        assert bool(torch.isfinite(out).all())


def random_carry(seed: int, heads: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    carry: torch.Tensor = torch.randn(heads, depth, depth, generator=generator) / depth**0.5
    return carry


@given(st.integers(0, 2**31), st.sampled_from(INTEGERS_AND_FP8), st.sampled_from([16, 32, 80]))
@settings(max_examples=40, deadline=None)
def test_numbers_rounded_in_turn_pass_on_what_they_lose(
    seed: int, kv_dtype: KvDtype, depth: int
) -> None:
    """By the definition, one number at a time; what is left of the diagonal is not looked at."""
    rows, carry = random_rows(seed, 6, depth).view(3, 2, depth), random_carry(seed, 2, depth)
    codes, scales = encode(rows, kv_dtype, carry)
    assert scales is not None
    values = decode(codes, scales)
    plain, _ = encode(rows, kv_dtype)
    left = rows.clone()
    for i in range(depth):
        # With the row's own scales, which are found before any number is rounded.
        alone = decode(codes, scales)
        alone[..., i] = nearest_value(left[..., i], scales, i, depth, kv_dtype)
        assert torch.equal(values[..., i], alone[..., i])
        lost = (left[..., i] - values[..., i])[..., None]
        left[..., i + 1 :] -= lost * carry[:, i, i + 1 :]
    none, none_scales = encode(rows, kv_dtype, carry.tril())
    assert torch.equal(none.view(torch.uint8), plain.view(torch.uint8))
    assert none_scales is not None and torch.equal(none_scales, scales)


def nearest_value(
    numbers: torch.Tensor, scales: torch.Tensor, i: int, depth: int, kv_dtype: KvDtype
) -> torch.Tensor:
    if kv_dtype == "int4":
        groups = scales.shape[-1] // 2
        group = i // (depth // groups)
        scale, least = scales[..., group].float(), scales[..., groups + group].float()
    else:
        scale, least = scales[..., 0].float(), torch.zeros(())
    values = torch.arange(16.0) if kv_dtype == "int4" else table(kv_dtype).float()
    ratios = (numbers - least) / scale
    distance = (ratios[..., None] - values).abs()
    near = values[distance.argmin(-1)]
    ties = (distance == distance.amin(-1, keepdim=True)).sum(-1) > 1
    if bool(ties.any()):  # to even, as without carry
        limit = float(values[-1])
        even = ratios.clamp(float(values[0]), limit)
        even = even.to(torch.float8_e4m3fn).float() if kv_dtype == "fp8" else even.round()
        near = torch.where(ties, even, near)
    return near * scale + least


@given(st.integers(0, 2**31), st.sampled_from(INTEGERS_AND_FP8), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_row_rounded_in_turn_has_the_same_codes_alone(
    seed: int, kv_dtype: KvDtype, row: int
) -> None:
    rows, carry = random_rows(seed, 12, 32).view(6, 2, 32), random_carry(seed, 2, 32)
    codes, scales = encode(rows, kv_dtype, carry)
    alone, alone_scales = encode(rows[row : row + 1], kv_dtype, carry)
    assert scales is not None and alone_scales is not None
    assert torch.equal(alone[0].view(torch.uint8), codes[row].view(torch.uint8))
    assert torch.equal(alone_scales[0], scales[row])


def test_decoding_reads_any_strides() -> None:
    codes, scales = encode(torch.randn(4, 6, 16), "fp8")
    assert scales is not None
    out, scratch = torch.empty(6, 4, 16), torch.empty(6, 4, 16, dtype=torch.int16)
    decode_into(out, codes.transpose(0, 1), scales.transpose(0, 1).float().clone(), scratch)
    assert torch.equal(out, decode(codes, scales).transpose(0, 1))


def test_bf16_rounds_and_has_no_scale() -> None:
    rows = torch.randn(3, 8)
    codes, scales = encode(rows, "bf16")
    assert scales is None
    assert torch.equal(decode(codes, None), rows.to(torch.bfloat16).to(torch.float32))


@pytest.mark.parametrize(("depth", "width"), [(64, 64), (80, 16), (96, 32), (128, 128), (7, 1)])
def test_the_rotation_is_orthonormal_its_own_inverse_and_block_diagonal(
    depth: int, width: int
) -> None:
    matrix = hadamard(depth)
    assert torch.equal(matrix, matrix.t())
    assert torch.allclose(matrix @ matrix, torch.eye(depth), atol=1e-6)
    blocks = torch.kron(torch.eye(depth // width), torch.ones(width, width))
    assert torch.equal(matrix != 0, blocks != 0)


@given(st.integers(1, 3 * ROW_TILE), st.integers(0, 200), st.sampled_from([16, 64, 80, 128]))
@settings(max_examples=40, deadline=None)
def test_a_row_is_rotated_to_the_same_bits_in_any_company(
    count: int, first: int, depth: int
) -> None:
    rows = torch.randn(400, depth, generator=torch.Generator().manual_seed(count))
    matrix = hadamard(depth)
    whole = multiply_rows(rows, matrix)
    part = rows[first : first + count]
    assert torch.equal(multiply_rows(part, matrix), whole[first : first + count])
    assert torch.equal(
        multiply_rows(part.view(len(part), 1, depth), matrix)[:, 0], whole[first : first + count]
    )
    assert torch.allclose(whole.double(), rows.double() @ matrix.double(), atol=1e-5)


def test_scores_survive_the_rotation() -> None:
    matrix = hadamard(96)
    q, k = torch.randn(10, 96), torch.randn(20, 96)
    rotated = multiply_rows(q, matrix) @ multiply_rows(k, matrix).t()
    assert torch.allclose(rotated, q @ k.t(), atol=1e-4)


@pytest.mark.parametrize("kv_dtype", INTEGERS_AND_FP8)
def test_rotation_lowers_the_error_of_scores_where_channels_are_outliers(kv_dtype: KvDtype) -> None:
    """As in trained models, q and K share a few large channels, and K's hardly vary.

    Softmax doesn't see what all keys have in common, so scores are compared without their mean.
    (Where only K has outliers and q is small there, fp8, whose error is relative, gains nothing.)
    """
    generator = torch.Generator().manual_seed(5)
    k = torch.randn(512, 64, generator=generator)
    q = torch.randn(256, 64, generator=generator)
    k[:, [3, 40]] += 12
    q[:, [3, 40]] *= 4
    matrix = hadamard(64)

    def error(stored: torch.Tensor) -> float:
        scores, wrong = q @ k.t(), q @ (stored - k).t()
        wrong -= wrong.mean(-1, keepdim=True)
        return float(wrong.norm() / (scores - scores.mean(-1, keepdim=True)).norm())

    plain = error(decode(*encode(k, kv_dtype)))
    rotated = decode(*encode(multiply_rows(k, matrix), kv_dtype))
    assert error(multiply_rows(rotated, matrix)) < 0.9 * plain
