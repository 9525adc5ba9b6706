"""Blocks of GGUF files: their values are the `gguf` package's, and products cannot tell them from
bf16 of the same values."""

from __future__ import annotations

from typing import get_args

import gguf
import numpy as np
import pytest
import torch

from kvass.common.errors import Invalid
from kvass.common.kernels import packed
from kvass.common.kernels.gguf_blocks import (
    SIZES,
    BlockKind,
    Blocks,
    Stack,
    bf16_of,
    stacked,
)
from kvass.common.kernels.packed import HugePages, PackedWeight
from kvass.common.model.gguf_file import TYPES
from kvass.common.model.products import COUNTS, Products, Use
from kvass.common.model.projection import StackedProjection, TorchProjection
from tiny_gguf import random_blocks

needs_products = pytest.mark.skipif(
    not packed.available(), reason="this process has no bf16 dot products"
)
KINDS: tuple[BlockKind, ...] = get_args(BlockKind)


def blocks_of(kind: BlockKind, outputs: int, inputs: int) -> Blocks:
    return Blocks(kind, inputs, torch.from_numpy(random_blocks(kind, outputs, inputs)))


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_gguf_package(kind: BlockKind) -> None:
    raw = random_blocks(kind, 129, 1024)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    blocks = Blocks(kind, 1024, torch.from_numpy(raw)).checked("")
    assert blocks.shape == expected.shape
    assert np.array_equal(blocks.values().numpy(), expected)
    some = torch.tensor([128, 0, 3, 3])
    assert np.array_equal(blocks.rows(some).values().numpy(), expected[some])


def test_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, values, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name and gguf.GGML_QUANT_SIZES[kind] == (values, size)
        assert values == 1 or SIZES[name] == (values, size)  # type: ignore[index]


@needs_products
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "blocks"), [(96, 1), (33, 3), (1, 2), (577, 4)])
def test_products_are_those_of_bf16_for_any_number_of_rows(
    kind: BlockKind, outputs: int, blocks: int
) -> None:
    weight = blocks_of(kind, outputs, SIZES[kind][0] * blocks)
    values, bias = bf16_of(weight), torch.randn(outputs).bfloat16()
    rows = torch.randn(513, weight.inputs).bfloat16()
    for threads in (1, 2):
        kept = PackedWeight.of(weight, bias, threads, HugePages())
        plain = PackedWeight.of(values, bias, threads, HugePages())
        assert kept.format == kind and kept.panels.nbytes <= plain.panels.nbytes * 0.55
        expected = plain.logits(rows)
        for count in (*range(1, 65), 100, 513):
            first = 513 - count
            assert torch.equal(kept.logits(rows[first:]), expected[first:])
        assert torch.equal(kept(rows), expected.bfloat16())
    exact = rows.double() @ values.double().T + bias.double()
    size = rows.double().abs() @ values.double().abs().T + bias.double().abs()
    assert bool(((expected - exact).abs() <= size * (weight.inputs + 2) * 2**-24).all())


@needs_products
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_the_files(kind: BlockKind) -> None:
    """Of the K formats' 6-bit factors a byte each is kept: less than 3 % more."""
    weight = blocks_of(kind, 64, 2048)
    kept = PackedWeight.of(weight, None, 1, HugePages()).panels.nbytes
    assert (
        weight.raw.nbytes <= kept <= weight.raw.nbytes * (1.03 if kind in ("Q4_K", "Q5_K") else 1.0)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_are_no_numbers_are_refused(kind: BlockKind) -> None:
    raw = random_blocks(kind, 8, 512)
    first = 208 if kind == "Q6_K" else 0
    raw[3, first : first + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(Invalid, match=r"file: blk holds values that are not finite"):
        Blocks(kind, 512, torch.from_numpy(raw)).checked("file: blk")


def test_stacked_matrices_are_one_where_they_can_be() -> None:
    one, two, other = (
        blocks_of("Q4_K", 3, 256),
        blocks_of("Q4_K", 5, 256),
        blocks_of("Q6_K", 2, 256),
    )
    together = stacked([one, two])
    assert isinstance(together, Blocks) and together.shape == (8, 256)
    assert isinstance(stacked([one, torch.zeros(4, 256)]), Stack)
    expected = torch.cat([one.values(), two.values(), other.values()]).bfloat16()
    assert torch.equal(bf16_of(stacked([one, two, other])), expected)


@pytest.mark.parametrize("weights", ["native", "bf16", "int8", "int4"])
@pytest.mark.parametrize("has_library", [True, False])
def test_a_stack_is_multiplied_part_by_part(
    weights: str, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(packed, "available", lambda: False)
    elif not packed.available():
        pytest.skip("this process has no bf16 dot products")
    parts = [blocks_of("Q4_K", 40, 256), blocks_of("Q6_K", 24, 256)]
    bias, rows = torch.randn(64).bfloat16(), torch.randn(7, 256).bfloat16()
    products = Products([Use(1, 2), Use(2, COUNTS[-1])], weights)  # type: ignore[arg-type]
    product = products.projection(stacked(parts), bias)
    alone = products.projection(bf16_of(stacked(parts)), bias)
    assert isinstance(product, StackedProjection) == (weights == "native")
    if not has_library:
        assert isinstance(alone, TorchProjection)
        assert torch.allclose(product(rows).float(), alone(rows).float(), rtol=2**-7, atol=0.1)
    else:
        assert torch.equal(product(rows), alone(rows))
