"""Compiled append: codes and scales by the rules of `formats`, and no other byte touched."""

from __future__ import annotations

import secrets

import pytest
import torch

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.kernels.formats import encode
from kvass.common.kernels.native_paged import NativePagedKv
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.kernels.turn import Turn
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory
from native_pools import exact_hadamard

pytestmark = pytest.mark.parametrize("level", library.levels())
COUNT = 45


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown when the test fails
    return torch.Generator().manual_seed(seed)


def read(memory: SlotMemory, layout: BlockLayout, value: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [tokens, bytes] and scales [tokens, 2 * parts], uint8, of layer 0 and head 0."""
    width = layout.row_size
    at = layout.code_offset(0, 0, value, 0)
    codes = memory.tensor[:, at : at + layout.block_tokens * width].reshape(-1, width)
    if not layout.has_scales:
        return codes[:COUNT], torch.empty(COUNT, 0, dtype=torch.uint8)
    parts = []
    for part in range(layout.scale_parts):
        at = layout.scale_offset(0, 0, value, 0, part)
        parts.append(memory.tensor[:, at : at + layout.block_tokens * 2].reshape(-1, 2))
    return codes[:COUNT], torch.cat(parts, 1)[:COUNT]


def unrotated(rows: torch.Tensor) -> torch.Tensor:
    """Return rows that the compiled transform turns into numbers that are known exactly.

    Blocks of 16 and 64 are divided by 4 and 8, and sums of few small integers are exact.
    """
    return (rows.double() @ exact_hadamard(rows.shape[-1])).float()


def of_all_sizes(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return factors for rows [2, COUNT, ...], with which sums of them are exact in float32; row 5
    has none, since it shall have one number that is 512 times as large as the rest."""
    exponents = torch.randint(-3, 4, rows.shape, generator=generator)
    exponents[:, 5] = 0
    return 2.0**exponents


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("depth", [64, 80])
def test_codes_are_those_of_formats(
    kv_dtype: KvDtype, depth: int, level: str, generator: torch.Generator
) -> None:
    """With inputs whose rotation is exact, so that all that rounds is the quantisation."""
    layout = BlockLayout(1, 1, depth, 16, kv_dtype)
    memory = SlotMemory(layout, 3)
    wanted = torch.randint(-2000, 2001, (2, COUNT, 1, depth), generator=generator).float()
    # Numbers of all sizes, subnormal codes among them; rows of zeros, and of almost nothing.
    wanted *= of_all_sizes(wanted, generator)
    wanted[:, 3] = 0
    wanted[:, 4] *= 2.0**-140
    wanted[:, 5, 0, 1:] *= 2.0**-9
    k, v = wanted if kv_dtype == "bf16" else unrotated(wanted)
    if kv_dtype == "fp8":
        v = wanted[1]
    kv = NativePagedKv(memory, layout, 1, level=level)
    positions = torch.arange(COUNT)
    kv.append(0, k, v, positions // 16, positions % 16)
    for value in (False, True):
        codes, scales = encode(wanted[int(value), :, 0], kv_dtype)
        found_codes, found_scales = read(memory, layout, value)
        assert torch.equal(found_codes, codes.view(torch.uint8).view(COUNT, -1))
        if scales is not None:
            assert torch.equal(found_scales, scales.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "depth", "tokens"), [(3, 64, 16), (2, 96, 7), (4, 128, 32)])
def test_stored_bytes_are_the_reference_s_but_for_the_rotation_s_order(
    kv_dtype: KvDtype, heads: int, depth: int, tokens: int, level: str, generator: torch.Generator
) -> None:
    """From views of a bf16 product, with rope: bf16 bit for bit, else codes one step apart at most,
    and few of them."""
    layout = BlockLayout(2, heads, depth, tokens, kv_dtype, heads)
    slots = -(-COUNT // tokens)
    memories = [SlotMemory(layout, slots) for _ in range(2)]
    fused = torch.randn(COUNT, (2 * heads + 1) * depth, generator=generator).bfloat16()
    k, v = fused[:, depth:].view(COUNT, 2 * heads, depth).chunk(2, dim=1)
    angle = torch.randn(COUNT, depth // 2, generator=generator) * 100
    turn = Turn(angle.cos(), angle.sin())
    positions = torch.arange(COUNT)
    order = torch.randperm(slots, generator=generator)[positions // tokens]
    for memory, kernels in zip(memories, (NativePagedKv, TorchPagedKv), strict=True):
        memory.array.fill(0xA5)
        options = {"level": level} if kernels is NativePagedKv else {}
        kernels(memory, layout, heads, **options).append(1, k, v, order, positions % tokens, turn)
    ours, theirs = (memory.tensor.view(torch.int8).int() for memory in memories)
    if kv_dtype == "bf16":
        assert torch.equal(ours, theirs)
    assert (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("depth", [64, 80])
def test_codes_of_k_rounded_in_turn_are_those_of_formats(
    kv_dtype: KvDtype, depth: int, level: str, generator: torch.Generator
) -> None:
    """Bit for bit, with inputs whose rotation is exact; each head by its own matrix."""
    layout = BlockLayout(2, 2, depth, 16, kv_dtype)
    memory = SlotMemory(layout, 3)
    wanted = torch.randint(-2000, 2001, (2, COUNT, 2, depth), generator=generator).float()
    wanted *= of_all_sizes(wanted, generator)
    wanted[:, 3] = 0
    wanted[:, 5, 0, 1:] *= 2.0**-9
    carry = torch.randn(2, 2, depth, depth, generator=generator) / depth**0.5
    k, v = unrotated(wanted[0]), wanted[1] if kv_dtype == "fp8" else unrotated(wanted[1])
    kv = NativePagedKv(memory, layout, 2, key_carry=carry, level=level)
    positions = torch.arange(COUNT)
    for rows in (positions[:33], positions[33:34], positions[34:]):
        kv.append(0, k[rows], v[rows], rows // 16, rows % 16)
    for value, carried in ((False, carry[0]), (True, None)):
        codes, scales = encode(wanted[int(value)], kv_dtype, carried)
        found_codes, found_scales = read(memory, layout, value)
        assert scales is not None
        assert torch.equal(found_codes, codes[:, 0].view(torch.uint8).view(COUNT, -1))
        assert torch.equal(found_scales, scales[:, 0].view(torch.uint8))


def test_no_other_byte_is_touched(level: str) -> None:
    for kv_dtype in KV_DTYPES:
        layout = BlockLayout(2, 2, 48, 5, kv_dtype, 2)
        memory = SlotMemory(layout, 4)
        memory.array.fill(0xA5)
        kv = NativePagedKv(memory, layout, 2, level=level)
        rows = torch.randn(2, 2, 48) + 9
        kv.append(1, rows, -rows, torch.tensor([3, 1]), torch.tensor([4, 0]))
        changed = memory.tensor != 0xA5
        allowed = torch.zeros_like(changed)
        for slot, token in ((3, 4), (1, 0)):
            for value in (False, True):
                for head in range(2):
                    at = layout.code_offset(head, 1, value, token)
                    allowed[slot, at : at + layout.row_size] = True
                    for part in range(layout.scale_parts):
                        at = layout.scale_offset(head, 1, value, token, part)
                        allowed[slot, at : at + 2] = True
        assert not bool((changed & ~allowed).any())
        assert int((changed & allowed).sum()) > int(allowed.sum()) * 0.9


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_token_s_bytes_do_not_depend_on_its_company(
    kv_dtype: KvDtype, level: str, generator: torch.Generator
) -> None:
    layout = BlockLayout(1, 3, 64, 16, kv_dtype)
    k, v = torch.randn(2, 300, 3, 64, generator=generator)
    positions = torch.arange(300)
    found = []
    for step, threads in ((300, 1), (300, 3), (77, 2), (1, 1)):
        memory = SlotMemory(layout, 19)
        kv = NativePagedKv(memory, layout, 3, level=level, threads=threads)
        for start in range(0, 300, step):
            rows = positions[start : start + step]
            kv.append(0, k[rows], v[rows], rows // 16, rows % 16)
        found.append(memory.tensor.clone())
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_not_finite_stays_so(kv_dtype: KvDtype, level: str) -> None:
    """A broken product must not come out as numbers: a NaN poisons its row's scale."""
    layout = BlockLayout(1, 1, 64, 16, kv_dtype)
    memory = SlotMemory(layout, 1)
    rows = torch.ones(1, 1, 64)
    rows[0, 0, 7] = torch.nan
    kv = NativePagedKv(memory, layout, 1, level=level)
    zero = torch.zeros(1, dtype=torch.int64)
    kv.append(0, rows, rows, zero, zero)
    assert kv.attend(0, torch.ones(1, 1, 64), kv.plan(zero[None], zero, zero)).isnan().any()
