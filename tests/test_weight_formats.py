"""Weights that are kept as codes: their values, and products that cannot be told from bf16's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import bit_models
from kvass.common.kernels import packed
from kvass.common.kernels.numerics import WeightFormat
from kvass.common.kernels.packed import HugePages, PackedWeight
from kvass.common.kernels.weight_formats import GROUP, Coded, Halved, executed
from kvass.common.model.known_answer import check, known_answer
from kvass.common.model.load import load_model
from kvass.common.model.products import COUNTS, Products, Use
from kvass.common.model.projection import TorchProjection
from kvass.common.model.runner import Rows
from test_known_answer import Worker, model_dir  # noqa: F401

needs_products = pytest.mark.skipif(
    not packed.available(), reason="this process has no bf16 dot products"
)
FORMATS: list[WeightFormat] = ["int8", "int4"]
SHAPES = [(960, 576), (33, 576), (70, 1535), (31, 7), (1, 1), (65, 2), (97, 4097), (64, 65)]
COUNTS_TRIED = (*range(1, 41), 100, 513)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw other numbers each time; pytest shows the seed of what fails."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    torch.manual_seed(seed)


def drawn(*shape: int) -> torch.Tensor:
    """Magnitudes far apart, as scales are, and a group of zeros."""
    values = torch.randn(*shape) * torch.randn(shape[0], 1).mul_(3).exp2()
    values[shape[0] // 2, : 2 * GROUP] = 0
    return values.to(torch.bfloat16)


def packed_of(
    weight: torch.Tensor, bias: torch.Tensor | None, threads: int, weights: WeightFormat = "bf16"
) -> PackedWeight:
    return PackedWeight.of(weight, bias, threads, HugePages(), weights)


def test_int8_is_the_nearest_code_of_a_scale() -> None:
    weight = drawn(40, 100)
    coded = Coded.of(weight)
    assert coded.codes.shape == (40, 4, GROUP) and bool((coded.codes[:, 3, 4:] == 0).all())
    values = coded.values()
    assert torch.equal(values, executed(weight, "int8")) and values.shape == weight.shape
    for output in range(40):
        for first in range(0, 100, GROUP):
            part = slice(first, min(first + GROUP, 100))
            scale = (weight[output, part].float().abs().max() / 127).to(torch.bfloat16).double()
            assert float(coded.scales[output, first // GROUP]) == scale
            wanted = weight[output, part].double() / (scale or 1)
            codes = coded.codes[output, first // GROUP][: len(wanted)].double()
            # A scale that was rounded down leaves the greatest magnitude beyond the last code.
            assert bool(((codes - wanted).abs() <= 0.5 + 1e-6).logical_or(codes.abs() == 127).all())
            assert torch.equal(values[output, part], (codes * scale).to(torch.bfloat16))


def test_int4_gives_the_values_of_its_own_kind_back() -> None:
    """Weights that are codes already stay what they are, as those of GGUF's Q4_1 are."""
    codes = torch.randint(0, 16, (40, 3, GROUP))
    codes[..., 0], codes[..., 1] = 0, 15
    scales, least = torch.rand(40, 3, 1) / 64, torch.randn(40, 3, 1) / 8
    wide = codes * scales.half().float() + least.half().float()
    weight = wide.to(torch.bfloat16).flatten(1)
    halved = Halved.of(weight[:, :90])
    assert halved.codes.shape == (40, 3, GROUP) and int(halved.codes.max()) == 15
    errors = (halved.values().float() - weight[:, :90].float()).abs()
    steps = scales.expand(40, 3, GROUP).flatten(1)[:, :90]
    rounding = weight[:, :90].float().abs().amax() * 2**-7
    assert bool((errors <= 0.51 * steps + rounding).all())
    flat = torch.full((2, 40), -3.0, dtype=torch.bfloat16)
    assert torch.equal(executed(flat, "int4"), flat)


def test_ties_go_to_even_codes_and_denormal_scales_are_zero() -> None:
    weight = torch.zeros(2, GROUP, dtype=torch.bfloat16)
    weight[0, :5] = torch.tensor([127, 0.5, 1.5, -2.5, -3.5])
    weight[1] = 2.0**-124
    coded = Coded.of(weight)
    assert coded.codes[0, 0, :5].tolist() == [127, 0, 2, -2, -4]
    assert float(coded.scales[1, 0]) == 0 and not coded.codes[1].any()
    assert executed(weight, "bf16") is weight


@needs_products
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_have_the_bits_of_their_values_in_bf16(
    outputs: int, inputs: int, weights: WeightFormat
) -> None:
    """In registers, and where a panel is made bf16 once; with any threads."""
    weight, bias = drawn(outputs, inputs), drawn(outputs, 1)[:, 0]
    rows = torch.randn(max(COUNTS_TRIED), inputs).to(torch.bfloat16)
    for added in (None, bias):
        plain = packed_of(executed(weight, weights), added, 2)
        expected = plain.logits(rows)
        assert bool(expected.isfinite().all())
        for threads in (1, 2, 3):
            coded = packed_of(weight, added, threads, weights)
            assert coded.panels.nbytes < 0.6 * plain.panels.nbytes or inputs < GROUP
            for count in COUNTS_TRIED:
                part = slice(len(rows) - count, None)
                assert torch.equal(coded.logits(rows[part]), expected[part])
            assert torch.equal(coded(rows), plain(rows))


@needs_products
@pytest.mark.parametrize("weights", FORMATS)
def test_products_that_run_at_once_have_rooms_of_their_own(weights: WeightFormat) -> None:
    """Of one thread after another in turns, with panels that grow and shrink."""
    rows = torch.randn(40, 900).to(torch.bfloat16)
    for inputs in (900, 33, 700, 899):
        weight = drawn(300, inputs)
        expected = packed_of(executed(weight, weights), None, 1)(rows[:, :inputs])
        assert torch.equal(packed_of(weight, None, 2, weights)(rows[:, :inputs]), expected)


@pytest.mark.parametrize("weights", FORMATS)
def test_without_packed_products_torch_multiplies_the_same_values(
    weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "available", lambda: False)
    weight = drawn(48, 64)
    product = Products([Use(1, COUNTS[-1])], weights).projection(weight, None)
    assert isinstance(product, TorchProjection)
    assert torch.equal(product.weight, executed(weight, weights))


@needs_products
@pytest.mark.parametrize("weights", FORMATS)
def test_a_model_of_codes_is_the_model_of_their_values(weights: WeightFormat) -> None:
    name = "bf16, head_dim 128, biases"
    coded = bit_models.model_of(name, Products([Use(2, 512)], weights).projection)
    plain = Products([Use(2, 512)])
    values = bit_models.model_of(
        name,
        lambda weight, bias, is_head=False: plain.projection(
            executed(weight, "int8" if is_head else weights), bias
        ),
    )
    pieces = [Rows([5, 9, 3, 7] * 10, 0, [0, 1, 2], logits=True)]
    found, expected = (bit_models.Bench(model, "fp8", 3).run(pieces) for model in (coded, values))
    assert found is not None and expected is not None and torch.equal(found, expected)


@pytest.mark.parametrize("weights", FORMATS)
def test_the_known_answer_is_of_the_executed_values(
    model_dir: Path,  # noqa: F811
    weights: WeightFormat,
    tmp_path: Path,
) -> None:
    worker = Worker(model_dir, "bf16")
    plain = known_answer(model_dir, worker.spec, tmp_path / "bf16")
    answer = known_answer(model_dir, worker.spec, tmp_path / weights, weights)
    assert not torch.equal(answer, plain)
    products = Products([Use(2, 512)], weights)
    worker.runner._model = load_model(model_dir, worker.spec, projection_of=products.projection)
    check(answer, worker.spec, worker.runner, worker.memory)
