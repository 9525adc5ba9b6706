"""Compiled attention: right against float64, and the same bits in any company, order and cut."""

from __future__ import annotations

import secrets

import pytest
import torch

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.errors import Invalid
from kvass.common.kernels.native_paged import NativePagedKv, unsupported
from kvass.common.kernels.paged import paged_kv
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory
from native_pools import NativePool, exact_attention, rounded_queries

# Levels of one arithmetic: float32 with fused products, and bf16 products.
FUSED = [level for level in library.levels() if level in ("avx2", "avx512")] or ["portable"]
PAIRS = "avx512bf16"
ALIKE = [FUSED, *([[PAIRS]] if PAIRS in library.levels() else [])]


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # shown when the test fails
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=library.levels())
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check(
    found: torch.Tensor,
    pool: NativePool,
    rows: list[tuple[int, int]],
    queries: torch.Tensor,
    layer: int,
    level: str,
    **options: float,
) -> None:
    """Compare with attention in float64; errors are absolute, outputs are some 0.5 on average.

    float32: 2e-5 at most (3e-6 was seen). bf16 products round queries, which moves scores: with
    queries three times as large as a model's, 1.6e-3 on average (0.02 at most) was seen. Of what is
    left, given the rounded queries, weights are the cause: 3.4e-4 on average and 3e-3 at most was
    seen, and no bias: the mean of all errors is far smaller.
    """
    exact = exact_attention(pool, rows, queries, layer, **options)  # type: ignore[arg-type]
    if level != PAIRS:
        assert float((found - exact).abs().max()) < 2e-5
        return
    assert float((found - exact).square().mean().sqrt()) < 5e-3
    rounded = rounded_queries(pool.layout, queries)
    errors = found - exact_attention(pool, rows, rounded, layer, **options)  # type: ignore[arg-type]
    assert float(errors.abs().max()) < 8e-3
    assert float(errors.square().mean().sqrt()) < 8e-4
    assert abs(float(errors.mean())) < 8e-5


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_the_compiled_kernels_are_what_workers_use() -> None:
    layout = BlockLayout(1, 3, 64, 16, "fp8")
    memory = SlotMemory(layout, 1)
    kernels: PagedKv[object] = paged_kv(memory, layout, 9)
    assert isinstance(kernels, NativePagedKv) and kernels.deterministic


SHAPES = [
    # query heads, KV heads, head_dim, block_tokens, head groups
    (3, 3, 64, 16, 3),
    (9, 3, 64, 16, 1),
    (8, 2, 80, 32, 2),
    (16, 2, 96, 64, 1),
    (4, 4, 128, 16, 2),
    (6, 2, 64, 7, 1),
    (8, 1, 128, 48, 1),
    (2, 1, 16, 16, 1),
    (5, 1, 256, 16, 1),
]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("query_heads", "kv_heads", "depth", "tokens", "groups"), SHAPES)
def test_attention_is_right(
    kv_dtype: KvDtype,
    query_heads: int,
    kv_heads: int,
    depth: int,
    tokens: int,
    groups: int,
    level: str,
    generator: torch.Generator,
) -> None:
    """Rows by themselves and in runs, of contexts within, at and beyond tiles and splits."""
    layout = BlockLayout(2, kv_heads, depth, tokens, kv_dtype, groups)
    pool = NativePool.of(layout, query_heads, [1, 7, 64, 130, 2500], generator)
    rows = [(sequence, length - 1) for sequence, length in enumerate(pool.lengths)]
    rows += [(4, position) for position in (0, 15, 16, 63, 64, 1023, 1024, 1025, 2047)]
    rows += [(3, position) for position in range(40, 130)]
    queries = 3 * pool.random(len(rows), query_heads, depth)
    out = pool.attend(pool.kernels(query_heads, level=level), rows, queries, layer=1)
    check(out, pool, rows, queries, 1, level)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, 0.0), (70, 0.0), (1100, 5.0), (0, 2.0)])
def test_windows_and_soft_caps(
    kv_dtype: KvDtype, window: int, soft_cap: float, level: str, generator: torch.Generator
) -> None:
    """What a window has left behind may be garbage: its slots belong to others by then."""
    layout = BlockLayout(1, 2, 64, 16, kv_dtype)
    pool = NativePool.of(layout, 6, [5, 200, 2300], generator)
    rows = [(0, 4), (1, 199), (2, 2299), (2, 63), (2, 64)]
    rows += [(2, position) for position in range(2200, 2290)]
    queries = 3 * pool.random(len(rows), 6, 64)
    kv = pool.kernels(6, level=level, window=window, soft_cap=soft_cap)
    found = pool.attend(kv, rows, queries)
    check(found, pool, rows, queries, 0, level, window=window, soft_cap=soft_cap)
    if window:
        pool.memory.array[pool.tables[2][: (2200 - window) // 16].numpy()] = 0xFF
        late = slice(5, None)
        assert same_bits(pool.attend(kv, rows[late], queries[late]), found[late])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("heads", "tokens"), [((9, 3), 16), ((8, 1), 16), ((2, 2), 11)])
@pytest.mark.parametrize("alike", ALIKE)
def test_a_row_has_the_same_bits_in_any_company(
    kv_dtype: KvDtype,
    heads: tuple[int, int],
    tokens: int,
    alike: list[str],
    generator: torch.Generator,
) -> None:
    """Alone, in a prefill, permuted, in chunks, on some threads, at levels that are alike."""
    layout = BlockLayout(1, heads[1], 64, tokens, kv_dtype)
    pool = NativePool.of(layout, heads[0], [2600, 300, 40], generator)
    rows = [(0, p) for p in range(2100, 2600)] + [(1, p) for p in range(300)] + [(2, 39), (0, 7)]
    queries = 3 * pool.random(len(rows), heads[0], 64)
    whole = pool.attend(pool.kernels(heads[0], threads=1, level=alike[0]), rows, queries)
    for at_level in alike:
        for threads in (1, 2, 5):
            kv = pool.kernels(heads[0], threads=threads, level=at_level)
            assert same_bits(pool.attend(kv, rows, queries), whole), (at_level, threads)
            cut = [
                pool.attend(kv, rows[i : i + 97], queries[i : i + 97])
                for i in range(0, len(rows), 97)
            ]
            assert same_bits(torch.cat(cut), whole), (at_level, threads)
    kv = pool.kernels(heads[0], threads=2, level=alike[0])
    order = torch.randperm(len(rows), generator=generator)
    shuffled = pool.attend(kv, [rows[i] for i in order.tolist()], queries[order])
    assert same_bits(shuffled, whole[order])
    for index in [0, 1, 63, 499, 500, 501, 563, 564, 799, 800, 801]:
        alone = pool.attend(kv, [rows[index]], queries[index : index + 1])
        assert same_bits(alone[0], whole[index]), rows[index]


def test_windows_change_no_bits_by_company(level: str, generator: torch.Generator) -> None:
    layout = BlockLayout(1, 1, 64, 16, "fp8")
    pool = NativePool.of(layout, 3, [2600], generator)
    rows = [(0, p) for p in range(1000, 2600, 3)]
    queries = pool.random(len(rows), 3, 64)
    kv = pool.kernels(3, threads=2, window=900, level=level)
    whole = pool.attend(kv, rows, queries)
    for index in range(0, len(rows), 41):
        alone = pool.attend(kv, [rows[index]], queries[index : index + 1])
        assert same_bits(alone[0], whole[index])


def test_bits_name_the_arithmetic() -> None:
    layout = BlockLayout(1, 1, 64, 16, "fp8")
    memory = SlotMemory(layout, 1)
    names = {level: NativePagedKv(memory, layout, 1, level=level).bits for level in FUSED}
    assert len(set(names.values())) == 1 and "torch" not in names.values()
    others = {"portable", PAIRS} & set(library.levels()) - set(FUSED)
    # x86 without FMA rounds products, and bf16 products are others: neither may share blocks.
    found = {NativePagedKv(memory, layout, 1, level=level).bits for level in others}
    assert len(found) == len(others) and not found & set(names.values())


def test_queries_are_read_where_they_lie(generator: torch.Generator) -> None:
    """Views of a product's rows, bf16 and float32, give what copies give."""
    layout = BlockLayout(1, 2, 64, 16, "fp8")
    pool = NativePool.of(layout, 4, [50], generator)
    rows = [(0, 3), (0, 49), (0, 20)]
    kv = pool.kernels(4)
    for dtype in (torch.float32, torch.bfloat16):
        fused = pool.random(3, 7 * 64).to(dtype)
        view = fused[:, 64:320].view(3, 4, 64)
        copied = pool.attend(kv, rows, view.float().clone())
        assert same_bits(pool.attend(kv, rows, view), copied)
        apart = pool.random(3, 64, 4).to(dtype).transpose(1, 2)
        assert same_bits(pool.attend(kv, rows, apart), pool.attend(kv, rows, apart.contiguous()))


def test_steps_of_no_rows_and_plans_side_by_side(generator: torch.Generator) -> None:
    layout = BlockLayout(1, 2, 64, 16, "int8")
    pool = NativePool.of(layout, 2, [2100, 2050], generator)
    kv = pool.kernels(2, threads=2)
    empty = torch.empty(0, dtype=torch.int64)
    assert kv.attend(0, torch.empty(0, 2, 64), kv.plan(pool.tables, empty, empty)).shape[0] == 0
    queries = pool.random(1, 2, 64)
    plans = [
        kv.plan(pool.tables, torch.tensor([sequence]), torch.tensor([length - 1]))
        for sequence, length in enumerate(pool.lengths)
    ]
    for sequence, plan in enumerate(plans):
        expected = pool.attend(kv, [(sequence, pool.lengths[sequence] - 1)], queries)
        assert same_bits(kv.attend(0, queries, plan), expected)


def test_what_is_not_served_is_refused_and_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    odd = BlockLayout(1, 1, 24, 16, "fp8")
    memory = SlotMemory(odd, 1)
    assert "head_dim 24" in unsupported(odd, 1)
    with pytest.raises(Invalid, match="head_dim 24"):
        NativePagedKv(memory, odd, 1)
    assert isinstance(paged_kv(memory, odd, 1), TorchPagedKv)
    assert "head_dim 24" in caplog.text
    layout = BlockLayout(1, 3, 64, 16, "fp8")
    with pytest.raises(Invalid, match="8 query heads"):
        NativePagedKv(SlotMemory(layout, 1), layout, 8)
    monkeypatch.setattr(library, "level", lambda: None)
    assert isinstance(paged_kv(SlotMemory(layout, 1), layout, 9), TorchPagedKv)
    with pytest.raises(Invalid, match="switched off"):
        NativePagedKv(SlotMemory(layout, 1), layout, 9)
