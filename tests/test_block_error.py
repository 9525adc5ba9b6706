"""The audit's measure: equal slots, rounding, one flipped bit, another block, no numbers at all."""

from __future__ import annotations

import pytest
import torch

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.model.block_error import block_error, digest
from kvass.common.pool.memory import SlotMemory


def memory_of(kv_dtype: KvDtype) -> tuple[SlotMemory, BlockLayout]:
    layout = BlockLayout(layers=2, kv_heads=2, head_dim=64, block_tokens=16, kv_dtype=kv_dtype)
    memory = SlotMemory(layout, 3)
    generator = torch.Generator().manual_seed(0)
    for slot in range(3):
        for layer in range(2):
            for value in (False, True):
                start = layout.record_offset(0, layer, value)
                codes = memory.tensor[slot, start : start + layout.codes_size]
                codes.copy_(_codes(kv_dtype, codes.numel(), generator))
                if layout.has_scales:
                    end = start + layout.codes_size
                    scales = memory.tensor[slot, end : end + layout.scales_size]
                    # Of int4 the second half are the least numbers.
                    parts = scales.view(torch.bfloat16).view(2, layout.scale_parts, -1)
                    parts.fill_(0.01)
                    parts[:, max(1, layout.scale_parts // 2) :] = -0.075
    return memory, layout


def _codes(kv_dtype: KvDtype, size: int, generator: torch.Generator) -> torch.Tensor:
    count = size // 2 if kv_dtype == "bf16" else size
    if kv_dtype == "int4":
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    normal = torch.randn(count, generator=generator)
    if kv_dtype == "bf16":
        return normal.to(torch.bfloat16).view(torch.uint8)
    if kv_dtype == "int8":
        return (normal * 40).clamp(-127, 127).round().to(torch.int8).view(torch.uint8)
    return (normal * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_what_is_equal_is_and_another_block_is_far_off(kv_dtype: KvDtype) -> None:
    memory, layout = memory_of(kv_dtype)
    memory.tensor[1] = memory.tensor[0]
    assert block_error(memory, layout, 0, 1) == 0.0
    assert digest(memory, layout, [0]) == digest(memory, layout, [1]) != digest(memory, layout, [2])
    assert block_error(memory, layout, 0, 2) > 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_codes_that_round_the_other_way_are_within_the_bound(kv_dtype: KvDtype) -> None:
    memory, layout = memory_of(kv_dtype)
    memory.tensor[1] = memory.tensor[0]
    start = layout.record_offset(0, 1, True)
    step = 2 if kv_dtype == "bf16" else 1  # the low byte of each code
    low = memory.tensor[1, start : start + layout.codes_size : step]
    if kv_dtype == "int8":
        low.copy_(
            (low.view(torch.int8).to(torch.int16) - 1)
            .clamp(-127, 127)
            .to(torch.int8)
            .view(torch.uint8)
        )
    else:
        low ^= 1
    assert 0 < block_error(memory, layout, 0, 1) <= 1


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("value", [False, True])
def test_one_head_of_one_layer_that_is_another_is_out_of_it(kv_dtype: KvDtype, value: bool) -> None:
    memory, layout = memory_of(kv_dtype)
    memory.tensor[1] = memory.tensor[0]
    start, size = layout.record_offset(0, 1, value), layout.codes_size // 2
    memory.tensor[1, start : start + size] = memory.tensor[0, start + size : start + 2 * size]
    assert block_error(memory, layout, 0, 1) > 2


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_groups", [1, 2])
def test_any_one_bit_is_an_error_and_padding_is_none(kv_dtype: KvDtype, head_groups: int) -> None:
    depth = 16 if kv_dtype == "int4" else 8
    layout = BlockLayout(1, 2, depth, 3, kv_dtype, head_groups)
    memory = SlotMemory(layout, 2)
    meant = set()
    for group in range(head_groups):
        for value in (False, True):
            start = layout.record_offset(group, 0, value)
            meant |= set(range(start, start + layout.codes_size + layout.scales_size))
    assert len(meant) < layout.block_size
    known = digest(memory, layout, [0])
    for place in range(layout.block_size):
        memory.tensor[1, place] = 128  # zeros: of a code it is the sign, which no number tells
        assert (block_error(memory, layout, 0, 1) > 0) == (place in meant)
        assert (digest(memory, layout, [1]) != known) == (place in meant)
        memory.tensor[1, place] = 0


def test_what_is_no_number_is_out_of_any_bound() -> None:
    memory, layout = memory_of("bf16")
    memory.tensor[1] = memory.tensor[0]
    memory.tensor[1, layout.record_offset(0, 0, True)] = 0xC0
    memory.tensor[1, layout.record_offset(0, 0, True) + 1] = 0x7F
    assert block_error(memory, layout, 0, 1) == float("inf")
