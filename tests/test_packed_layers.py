"""Layers run in one call of the compiled library: the bits of layers run one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bit_models import SPECS, Bench, model_of
from kvass.common.kernels import packed
from kvass.common.kernels.numerics import WEIGHTS, WeightFormat
from kvass.common.model.llama import Llama
from kvass.common.model.products import Products
from kvass.common.model.runner import Rows, uses

pytestmark = pytest.mark.skipif(
    not packed.available(), reason="this process has no bf16 dot products"
)
BF16 = [name for name, (_, dtype) in SPECS.items() if dtype == torch.bfloat16]
SLOTS = 24


def deep(name: str, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> Llama:
    """Return a model of five layers: of two, one call would run one alone."""
    spec, dtype = SPECS[name]
    monkeypatch.setitem(SPECS, name, (replace(spec, layers=5), dtype))
    return model_of(name, Products(uses(), weights).projection)


def steps(vocabulary: int) -> list[list[Rows]]:
    """Prompts, one of them alone, then single rows of all together, then a row that stores none."""
    tokens = [(17 * i + 5) % vocabulary for i in range(200)]
    tables = [list(range(first, first + 8)) for first in (0, 8, 16)]
    lengths = (1, 37, 110)
    prompts = [Rows(tokens[:n], 0, t) for n, t in zip(lengths, tables, strict=True)]
    nexts = [
        Rows(tokens[n : n + 1], n, t, logits=True) for n, t in zip(lengths, tables, strict=True)
    ]
    again = [replace(nexts[0], write=False), Rows(tokens[38:41], 38, tables[1], logits=True)]
    return [prompts[:1], prompts[1:], nexts, nexts[2:], again]


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_bits_are_those_of_layers_one_by_one(
    name: str, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep(name, weights, monkeypatch)
    assert model._packed is not None
    one_by_one = deep(name, weights, monkeypatch)
    one_by_one._packed = None
    ours, theirs = Bench(model, "fp8", SLOTS), Bench(one_by_one, "fp8", SLOTS)
    for pieces in steps(model.spec.vocab_size):
        given, expected = ours.run(pieces), theirs.run(pieces)
        assert (given is None) == (expected is None)
        if given is not None and expected is not None:
            assert given.isfinite().all() and torch.equal(given, expected)
    assert torch.equal(ours.memory.tensor, theirs.memory.tensor)


def test_a_model_in_float32_runs_its_layers_one_by_one() -> None:
    (name,) = set(SPECS) - set(BF16)
    assert model_of(name)._packed is None
