"""Row counts of products: found, used, reported; and every operation beside them, by its bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from kvass.common.kernels.formats import encode
from kvass.common.kernels.rotation import hadamard, multiply_rows
from kvass.common.kernels.turn import turned
from kvass.common.model import products
from kvass.common.model.device_kind import device_kind
from kvass.common.model.layers import gated_silu, linear, logits, rms_norm
from kvass.common.model.products import COUNTS, Kind, Products, Use
from kvass.common.model.rope import angles

THREADS = (1, 2)
ROWS = 130
COMPANIES = (*range(1, 41), 63, 100, 129, ROWS)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Leave torch's threads as they were."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def differing(compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> set[int]:
    """Return the row counts at which some row has other bits than among all rows."""
    torch.set_num_threads(THREADS[-1])
    expected = compute(rows)
    found = set()
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count in COMPANIES:
            for first in {(len(rows) - count) // 2, len(rows) - count}:
                part = slice(first, first + count)
                if not torch.equal(compute(rows[part]), expected[part]):
                    found.add(count)
    return found


def searched(weight: torch.Tensor, *, has_bias: bool = False) -> tuple[int, ...]:
    torch.set_num_threads(THREADS[-1])
    found = Products([Use(threads, COUNTS[-1]) for threads in THREADS])
    counts = found.counts_of(weight, weight[:, 0] if has_bias else None)
    assert not found.failures
    return counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (80, 48), (65, 4096)])
def test_a_row_has_the_same_bits_in_any_product(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    """With numbers that cancel, so that an order of summation shows in every value."""
    trial = products._Trial.of(Kind(outputs, inputs, dtype, True), ROWS)
    counts = searched(trial.weight, has_bias=True)
    bad = differing(lambda rows: linear(rows, trial.weight, trial.bias, counts), trial.rows)
    assert not bad


def test_a_product_of_any_count_would_differ() -> None:
    """That the numbers of the test above tell: float32 has no kernel for odd rows anywhere."""
    trial = products._Trial.of(Kind(576, 1536, torch.float32, False), ROWS)
    bad = differing(lambda rows: F.linear(rows, trial.weight), trial.rows)
    if not bad:
        pytest.skip("this machine's products agree at every row count")
    safe = searched(trial.weight)
    assert not bad & set(safe) and set(COUNTS) - set(safe) == bad & set(COUNTS)


def test_rows_are_padded_to_the_next_count_and_cut_at_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    real = F.linear

    def spy(rows: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        seen.append(len(rows))
        return real(rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "linear", spy)
    weight = torch.randn(5, 7)
    rows = torch.randn(21, 7)
    for count, expected in ((1, [4]), (4, [4]), (5, [8]), (8, [8]), (21, [8, 8, 8]), (0, [0])):
        seen.clear()
        out = linear(rows[:count], weight, counts=(4, 8))
        assert seen == expected
        assert torch.allclose(out, real(rows[:count], weight), atol=1e-5)
    seen.clear()
    linear(rows[:3], weight)
    assert seen == [3]


def fail_at(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[int], bool]) -> None:
    """Let products of these row counts have another bit."""
    real = F.linear

    def faulty(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = real(rows, weight, bias)
        return torch.nextafter(out, out + 1) if wrong(len(rows)) else out

    monkeypatch.setattr(F, "linear", faulty)


def test_counts_that_differ_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, lambda count: count % 8 != 0)
    found = Products([Use(1, 2), Use(2, COUNTS[-1])])
    counts = found.counts_of(torch.empty(16, 16), None)
    assert counts == tuple(count for count in COUNTS if count % 8 == 0)
    assert found.reason == "products of 8, 16, 24, 32, 48, 64, …, 512 rows"


def test_a_product_without_safe_counts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, lambda count: count < 96)
    found = Products([Use(1, COUNTS[-1])])
    assert found.counts_of(torch.empty(16, 12), None) == ()
    assert found.failures and "product 16x12 float32" in found.reason
    assert "1, 2, 3, 4, 6, 8, …, 80" in found.reason


def test_more_rows_than_threads_share_evenly_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with three threads on plain AVX-512: a row's place among 512 decides its kernel."""
    real = F.linear

    def faulty(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = real(rows, weight, bias)
        if len(rows) in (448, 512):
            out[100] += 1
        return out

    monkeypatch.setattr(F, "linear", faulty)
    found = Products([Use(1, 2), Use(2, COUNTS[-1])])
    counts = found.counts_of(torch.empty(16, 16), None)
    assert counts[-1] == 384 and not found.failures


def test_only_counts_that_a_use_can_come_to_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread computes two rows at most: what it makes of 24 rows decides nothing."""
    fail_at(monkeypatch, lambda count: torch.get_num_threads() == 1 and count in (2, 24))
    torch.set_num_threads(2)
    counts = Products([Use(1, 2), Use(2, COUNTS[-1])]).counts_of(torch.empty(16, 16), None)
    assert 2 not in counts and 24 in counts
    assert torch.get_num_threads() == 2


def test_the_digest_tells_other_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(kernels: str = "torch") -> str:
        found = Products([Use(1, 8)])
        found.counts_of(torch.empty(48, 64, dtype=torch.bfloat16), None)
        return device_kind(found, kernels)

    ours = kind()
    assert ours == kind() and ours.startswith("cpu ")
    assert kind("others") != ours
    with monkeypatch.context() as patch:
        # Another order of summation, as another kernel may have it.
        real, order = F.linear, torch.arange(64).flip(0)
        patch.setattr(F, "linear", lambda x, w, b=None: real(x[:, order], w[:, order], b))
        assert kind() != ours
    monkeypatch.setattr(torch, "exp", lambda x: torch.pow(torch.e, x))
    assert kind() != ours


# --- the operations beside products ---------------------------------------------------------------


@pytest.mark.parametrize("width", [576, 101, 33, 4096])
def test_norms_do_not_depend_on_company(width: int) -> None:
    weight = torch.randn(width).to(torch.bfloat16)
    rows = torch.randn(ROWS, width)
    assert not differing(lambda part: rms_norm(part, weight, 1e-5), rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [3072, 2002, 34])
def test_gates_do_not_depend_on_company(width: int, dtype: torch.dtype) -> None:
    assert not differing(gated_silu, (torch.randn(ROWS, width) * 3).to(dtype))


def test_silu_in_bf16_is_the_same_for_every_value_alone_and_among_others() -> None:
    """Why it may be used there: many at a time or one by one, all 65,536 values agree."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    together = F.silu(values)
    alone = torch.cat([F.silu(values[index : index + 1]) for index in range(len(values))])
    assert torch.equal(together.nan_to_num(7.5), alone.nan_to_num(7.5))


@pytest.mark.parametrize("width", [576, 101])
def test_logits_do_not_depend_on_company(width: int) -> None:
    weight = torch.randn(300, width).to(torch.bfloat16)
    counts = searched(weight)
    rows = torch.randn(ROWS, width).to(torch.bfloat16)
    assert not differing(lambda part: logits(part, weight, counts), rows)


@pytest.mark.parametrize("depth", [64, 80, 10])
def test_rope_rotation_and_formats_do_not_depend_on_company(depth: int) -> None:
    frequencies = 1.0 / (10_000 ** (torch.arange(0, depth, 2) / depth))
    matrix = hadamard(depth)
    rows = torch.randn(ROWS, 3, depth)
    rows[:, 0, 0] = torch.arange(ROWS)  # each row's position, which goes where it goes

    def stored(part: torch.Tensor) -> torch.Tensor:
        turn = angles(part[:, 0, 0].long(), frequencies)
        return multiply_rows(turned(part, turn), matrix)

    assert not differing(stored, rows)
    assert not differing(lambda part: encode(part, "fp8")[0].view(torch.uint8), rows)
    assert not differing(lambda part: encode(part, "int8")[0], rows)
