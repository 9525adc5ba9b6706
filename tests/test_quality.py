"""The quality benchmark: its exact KV is exact, its sums are what they say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import quality
from dense_kv import DenseKv
from kvass.common.block import KV_DTYPES
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.turn import Turn
from kvass.common.model.spec import ModelSpec

LAYERS, HEADS, KV_HEADS, DEPTH = 2, 4, 2, 16
SPEC = ModelSpec(
    *("LlamaForCausalLM", LAYERS, 64, HEADS, KV_HEADS, DEPTH, 96, 211, 1e4, None, 1e-5),
    *(True, False, 256, (2,), 1),
)


def test_exact_kv_attends_by_definition_and_a_rounding_is_seen() -> None:
    count = 37
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(count, HEADS, DEPTH, generator=generator)
    k, v = torch.randn(2, count, KV_HEADS, DEPTH, generator=generator)
    angle = torch.randn(count, DEPTH // 2, generator=generator)
    turn, rows = Turn(angle.cos(), angle.sin()), torch.arange(count)
    ways: dict[str, PagedKv[Any]] = {
        "definition": DenseKv(LAYERS, KV_HEADS, DEPTH, slots=3),
        "exact": quality.WholeKv(SPEC, count, lambda each: each),
        "rounded": quality.WholeKv(SPEC, count, quality.unscaled),
    }
    found = {}
    for name, kv in ways.items():
        outputs = []
        for piece in (rows[:20], rows[20:]):  # in two steps
            of = turn.of_rows(piece)
            kv.append(1, k[piece], v[piece], piece // 16, piece % 16, of)
            plan = kv.plan(torch.arange(3)[None], torch.zeros_like(piece), piece)
            outputs.append(kv.attend(1, q[piece], plan, of))
        found[name] = torch.cat(outputs)
    torch.testing.assert_close(found["exact"], found["definition"], rtol=1e-5, atol=1e-5)
    error = (found["rounded"] - found["exact"]).norm() / found["exact"].norm()
    assert 0.01 < float(error) < 0.1


def test_a_loss_is_the_mean_over_positions() -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    losses = {}
    for name, values in ((quality.EXACT, exact), (quality.UNSCALED, ours)):
        losses[name] = quality.Loss()
        losses[name].add(values, exact, torch.tensor([1]))  # what follows the last is not known
    figures = {each.name: each for each in quality.figures_of(2, losses)}
    divergence = figures["2, unscaled e4m3: divergence"].value
    assert divergence == pytest.approx(1000 * (0.5 - 0.25) * math.log(2) / 2)
    perplexity = figures["2, unscaled e4m3: perplexity"]
    assert perplexity.value == pytest.approx(2)
    assert perplexity.reference_value == pytest.approx(4)
    assert figures["2, unscaled e4m3: same best token"].value == 50
    lines = quality.table_of({2: losses, 2048: losses}, SPEC).splitlines()
    assert lines[0].startswith("| KV as | bits a number | 2 tokens: divergence, millinats |")
    assert lines[0].count("|") == lines[1].count("|") == 9 and "| 2,048 tokens: " in lines[0]
    assert lines[2].startswith("| float32 | 32 | 0.00 | 4.000 | 100.00 % | 0.00 |")
    assert lines[3].startswith(f"| unscaled e4m3 | 8 | {divergence:.2f} | 2.000 | 50.00 % |")


def test_bits_count_scales() -> None:
    bits = {name: quality.stored_bits(name, SPEC) for name in (*KV_DTYPES, "float32")}
    assert bits == {"fp8": 9, "int8": 9, "int4": 6, "bf16": 16, "float32": 32}  # heads of 16
