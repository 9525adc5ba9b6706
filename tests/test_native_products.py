"""Products with packed weights, and the small operations beside them: values, and bits."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvass.common.kernels import packed, row_operations
from kvass.common.kernels.block_panels import PANEL
from kvass.common.kernels.packed import HugePages, PackedWeight
from kvass.common.model import layers, products
from kvass.common.model.products import COUNTS, Kind, Products, Use
from kvass.common.model.projection import TorchProjection
from kvass.common.native import library

needs_products = pytest.mark.skipif(
    not packed.available(), reason="this process has no bf16 dot products"
)
# Rows of a block, of a chunk (some 250 to 560 here), and beyond.
MANY = (64, 97, 250, 253, 512, 601)
SHAPES = [(960, 576), (33, 576), (576, 1535), (31, 7), (1, 1), (65, 2), (97, 4097)]


@pytest.fixture(autouse=True)
def _seed() -> int:
    """Draw other numbers each time; pytest shows the seed of what fails."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return seed


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def packed_of(weight: torch.Tensor, bias: torch.Tensor | None, threads: int) -> PackedWeight:
    return PackedWeight.of(weight, bias, threads, HugePages())


def telling(outputs: int, inputs: int, count: int) -> tuple[torch.Tensor, ...]:
    """Rows, weight and bias of which another order of sums would show in every value."""
    rows, weight, bias = products._telling(Kind(outputs, inputs, torch.bfloat16, True), count)
    assert bias is not None
    return rows, weight, bias


# --- products -------------------------------------------------------------------------------------


@needs_products
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_right_for_any_number_of_rows(
    outputs: int, inputs: int, has_bias: bool
) -> None:
    rows, weight = drawn(max(MANY), inputs), drawn(outputs, inputs)
    bias = drawn(outputs) if has_bias else None
    product = packed_of(weight, bias, 2)
    exact = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    # What rounding may do: to each of `inputs` products and sums in float32, and to the result.
    size = rows.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.abs())
    for count in (*range(1, 41), *MANY):
        here = slice(max(MANY) - count, None)
        summed = product.logits(rows[here]).double()
        assert bool(((summed - exact[here]).abs() <= size[here] * (inputs + 2) * 2**-24).all())
        rounded = product(rows[here])
        assert torch.equal(rounded, product.logits(rows[here]).to(torch.bfloat16))


@needs_products
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_at_every_count_place_and_thread_count(
    outputs: int, inputs: int
) -> None:
    rows, weight, bias = telling(outputs, inputs, max(MANY))
    whole = packed_of(weight, bias, 1).logits(rows)
    if inputs > 500:  # else few roundings differ
        other = packed_of(weight.flip(1), bias, 1).logits(rows.flip(1))
        assert not torch.equal(whole, other), "the numbers must tell one order from another"
    for threads in (1, 2, 3):
        product = packed_of(weight, bias, threads)
        for count in (*range(1, 41), *MANY):
            for first in {0, (len(rows) - count) // 2, len(rows) - count}:
                part = slice(first, first + count)
                assert torch.equal(product.logits(rows[part]), whole[part])
                assert torch.equal(product(rows[part]), whole[part].to(torch.bfloat16))


@needs_products
def test_an_output_has_the_same_bits_among_any_others() -> None:
    """So that q alone is what it is in q‖k‖v."""
    rows, weight, bias = telling(200, 577, 40)
    whole = packed_of(weight, bias, 2).logits(rows)
    for first, stop in ((0, 120), (120, 200), (7, 8), (31, 100)):
        part = slice(first, stop)
        assert torch.equal(packed_of(weight[part], bias[part], 2).logits(rows), whole[:, part])


@needs_products
@pytest.mark.parametrize("rounded", [0, 1])
@pytest.mark.parametrize(("count", "outputs", "inputs"), [(1, 33, 7), (13, 65, 64), (30, 95, 3)])
def test_a_product_writes_its_values_and_nothing_else(
    count: int, outputs: int, inputs: int, rounded: int
) -> None:
    """Beyond the last row, and with garbage for what lies behind rows."""
    room = torch.full((count * inputs + 64,), float("nan"), dtype=torch.bfloat16)
    rows = room[: count * inputs].view(count, inputs)
    rows.copy_(drawn(count, inputs))
    weight = packed_of(drawn(outputs, inputs), None, 2)
    values, size = count * outputs, 2 if rounded else 4
    out = torch.full((values * size + 128,), 0xA5, dtype=torch.uint8)
    packed._multiply()(
        2, rows.data_ptr(), count, inputs, 0, weight.panels.data_ptr(), outputs, None,
        out.data_ptr(), rounded,
    )  # fmt: skip
    dtype = torch.bfloat16 if rounded else torch.float32
    written = out[: values * size].view(dtype).view(count, outputs)
    assert torch.equal(written, weight(rows) if rounded else weight.logits(rows))
    assert not written.isnan().any() and bool((out[values * size :] == 0xA5).all())


@needs_products
def test_numbers_that_are_none_stay_in_their_rows_and_outputs() -> None:
    rows, weight = drawn(20, 66), drawn(70, 66)
    rows[3, 5], weight[40, 7] = float("nan"), float("inf")
    found = packed_of(weight, None, 2).logits(rows)
    assert bool(found[3].isnan().all())
    others = [row for row in range(20) if row != 3]
    assert bool(found[others][:, 40].isinf().all())
    assert bool(found[others][:, [o for o in range(70) if o != 40]].isfinite().all())
    assert torch.equal(packed_of(weight, None, 2)(rows[:0]), torch.empty(0, 70).bfloat16())


def test_taken_pages_do_not_overlap() -> None:
    pages = HugePages()
    sizes = [1, 63, 65, 160 << 20, 7, 1]
    taken = [pages.take(size) for size in sizes]
    for number, part in enumerate(taken):
        assert part.data_ptr() % 64 == 0 and len(part) >= sizes[number]
        part[:1], part[-1:] = number, number
    assert [(float(part[0]), float(part[-1])) for part in taken] == [(n, n) for n in range(6)]


def test_pages_go_back_with_the_last_weight_in_them() -> None:
    def mapped() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0])

    before, size = mapped(), 200 << 20
    pages = HugePages()
    part = pages.take(size).fill_(1)[:64]
    del pages
    assert mapped() - before > size >> 11  # kilobytes
    assert int(part.sum()) == 64
    del part
    assert mapped() - before < size >> 12


@needs_products
def test_weights_are_packed_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Products([Use(1, 2), Use(2, COUNTS[-1])])
    product = found.projection(drawn(48, 64), None)
    assert isinstance(product, PackedWeight) and product.threads == 2
    assert product.panels.numel() == 2 * PANEL * 64
    assert found.reason == "products of packed weights, of any number of rows"
    ours = found.digest
    assert isinstance(found.projection(torch.randn(16, 16), None), TorchProjection)
    assert "of packed weights" in found.reason and "512 rows" in found.reason
    monkeypatch.setattr(packed, "available", lambda: False)
    found = Products([Use(1, 2), Use(2, COUNTS[-1])])
    assert isinstance(found.projection(drawn(48, 64), None), TorchProjection)
    assert "packed" not in found.reason and found.digest != ours


@needs_products
def test_the_digest_tells_another_order_of_packed_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> str:
        found = Products([Use(1, 2)])
        found.projection(drawn(48, 576), None)
        return found.digest

    ours = digest()
    assert digest() == ours
    real = PackedWeight.of
    monkeypatch.setattr(PackedWeight, "of", lambda w, *rest: real(w.flip(1), *rest))
    turned = PackedWeight.logits
    monkeypatch.setattr(PackedWeight, "logits", lambda self, rows: turned(self, rows.flip(1)))
    assert digest() != ours


# --- norms and gates ------------------------------------------------------------------------------


@pytest.fixture(params=library.LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let `row_operations` use this level."""
    at = str(request.param)
    if at not in library.levels():
        pytest.skip(library.missing() or f"this machine has no {at}")

    def function(name: str, *arguments: Any) -> Callable[..., Any]:
        return library.function_at(name, at, None, *arguments)

    norm, gate = (
        function("kvass_norm", *row_operations.NORM),
        function("kvass_gate", *row_operations.GATE),
    )
    monkeypatch.setattr(row_operations, "_norm", lambda: norm)
    monkeypatch.setattr(row_operations, "_gate", lambda: gate)
    return at


def within_a_rounding(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """bf16 rounds by 2⁻⁸ at most; float32 arithmetic before may move a tie."""
    return bool(((found.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-18) + 1e-36).all())


@pytest.mark.parametrize("width", [576, 16, 15, 101, 4097, 1])
def test_norms_are_right(level: str, width: int) -> None:
    rows, addend, weight = torch.randn(70, width) * 9, drawn(70, width), drawn(width)
    before, summed = rows.clone(), rows + addend
    for more, values in ((None, before), (addend, summed)):
        found = row_operations.norm(rows, more, weight, 1e-5, 2)
        assert torch.equal(rows, values), "rows take the addend, and nothing else"
        wide = values.double()
        scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        assert within_a_rounding(found, wide * scale * weight.double())
        theirs = (values * (values.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight).to(
            torch.bfloat16
        )
        assert bool((found.float() - theirs.float()).abs().le(theirs.float().abs() / 127).all())


@pytest.mark.parametrize("width", [1536, 16, 15, 101, 1])
def test_gates_are_right(level: str, width: int) -> None:
    gate_up = (torch.randn(70, 2 * width) * 4).to(torch.bfloat16)
    gate, up = gate_up.double().chunk(2, -1)
    assert within_a_rounding(row_operations.gate(gate_up, 2), gate * torch.sigmoid(gate) * up)


def test_gates_of_every_value(level: str) -> None:
    """All finite ones: where e to their power is nothing, or more than float32 holds, too."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = values[values.isfinite()]
    found = row_operations.gate(torch.cat([finite, torch.ones_like(finite)])[None], 2)[0]
    wide = finite.double()
    assert within_a_rounding(found, wide * torch.sigmoid(wide))
    broken = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], dtype=torch.bfloat16)
    assert bool(row_operations.gate(broken, 1).isnan().all())
    torch_s = torch.nn.functional.silu(finite)
    assert bool(
        (found.float() - torch_s.float()).abs().le(torch_s.float().abs() / 127 + 1e-36).all()
    )


@pytest.mark.parametrize("width", [576, 101, 15])
def test_rows_have_the_same_bits_in_any_company(level: str, width: int) -> None:
    rows, addend, weight = torch.randn(700, width), drawn(700, width), drawn(width)
    gate_up = drawn(700, 2 * width)
    expected: list[torch.Tensor] = []
    for threads in (1, 2):
        for count in (700, *range(1, 20), 57, 333):
            part = slice(700 - count, None)
            found = [
                row_operations.norm(rows[part].clone(), addend[part], weight, 1e-5, threads),
                row_operations.gate(gate_up[part], threads),
            ]
            expected = expected or found
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs[part])


def test_a_value_has_the_same_bits_in_any_place_of_its_row(level: str) -> None:
    """Ends of rows are computed as whole vectors are."""
    gate, up = drawn(45), drawn(45)
    whole = row_operations.gate(torch.cat([gate, up])[None], 1)[0]
    for first in range(45):
        pair = torch.cat([gate[first:], up[first:]])[None]
        assert torch.equal(row_operations.gate(pair, 1)[0], whole[first:])


@pytest.mark.parametrize("width", [33, 101])
def test_operations_write_their_values_and_nothing_else(level: str, width: int) -> None:
    rows, weight = torch.full((3 * width + 16,), float("nan")), drawn(width)
    rows[: 3 * width] = torch.randn(3 * width)
    out = torch.full((3 * width + 64,), 7.0, dtype=torch.bfloat16)
    row_operations._norm()(
        2, rows.data_ptr(), None, weight.data_ptr(), ctypes.c_float(1e-5), out.data_ptr(), 3, width
    )
    assert bool((out[3 * width :] == 7).all()) and bool(out[: 3 * width].isfinite().all())
    gate_up = torch.full((6 * width + 16,), float("nan"), dtype=torch.bfloat16)
    gate_up[: 6 * width] = drawn(6 * width)
    out.fill_(7)
    row_operations._gate()(2, gate_up.data_ptr(), out.data_ptr(), 3, width)
    assert bool((out[3 * width :] == 7).all()) and bool(out[: 3 * width].isfinite().all())


def test_without_the_library_torch_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, addend, weight = torch.randn(5, 64), drawn(5, 64), drawn(64)
    gate_up = drawn(5, 128)
    native = [layers.add_norm(rows.clone(), addend, weight, 1e-5), layers.gated_silu(gate_up)]
    monkeypatch.setattr(row_operations, "available", lambda: False)
    monkeypatch.setattr(row_operations, "_norm", None)
    monkeypatch.setattr(row_operations, "_gate", None)
    plain = [layers.add_norm(rows, addend, weight, 1e-5), layers.gated_silu(gate_up)]
    for ours, theirs in zip(native, plain, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-6, atol=1e-3)
