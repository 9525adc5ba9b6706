"""What a row does not see changes no bit of it, whatever is stored there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.native import library
from native_pools import NativePool

NAN = 0x7FC0
POISONS = [NAN, 0xFFC1, 0x7F80, 0xFF80, 0x7F7F]  # NaNs, infinities, a huge number: bits of bf16
ROWS = [(0, position) for position in range(20, 150)]


def bits_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.view(torch.int32)


def look(pool: NativePool, kv: Any, poison: int, unseen: range, rows: slice) -> None:
    """Poison K, then V as well, of positions that `rows` of ROWS do not see."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(len(ROWS), 6, pool.layout.head_dim, generator=generator)
    whole = pool.attend(kv, ROWS, queries)
    assert bool(whole.isfinite().all())
    before = pool.memory.array.copy()
    for value in (False, True):
        pool.poison(0, unseen, poison, value=value)
        again = pool.attend(kv, ROWS, queries)
        assert torch.equal(bits_of(again[rows]), bits_of(whole[rows]))
        for index in (rows.start, rows.stop - 1):
            alone = pool.attend(kv, [ROWS[index]], queries[index : index + 1])
            assert torch.equal(bits_of(alone[0]), bits_of(whole[index]))
        if poison == NAN:  # and what a row does see is not hidden
            others = torch.cat([again[: rows.start], again[rows.stop :]])
            assert bool(others.isnan().flatten(1).any(1).all())
    pool.memory.array[:] = before


def pool_of(kv_dtype: KvDtype, depth: int, tokens: int) -> NativePool:
    layout = BlockLayout(1, 2, depth, tokens, kv_dtype)
    return NativePool.of(layout, 6, [150], torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(("depth", "tokens"), [(64, 16), (80, 7)])
@pytest.mark.parametrize("level", library.levels())
def test_compiled_attention(kv_dtype: KvDtype, depth: int, tokens: int, level: str) -> None:
    """What comes after a row, in its own tile too, and what its window has left behind."""
    pool = pool_of(kv_dtype, depth, tokens)
    whole = pool.kernels(6, level=level, threads=2)
    window = pool.kernels(6, level=level, threads=2, window=30)
    for poison in POISONS:
        look(pool, whole, poison, range(101, 150), slice(0, 81))
        look(pool, window, poison, range(101, 150), slice(0, 81))
        look(pool, window, poison, range(60), slice(69, 130))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("poison", POISONS)
def test_torch_s_attention(kv_dtype: KvDtype, poison: int) -> None:
    pool = pool_of(kv_dtype, 64, 16)
    kv = TorchPagedKv(pool.memory, pool.layout, 6)
    look(pool, kv, poison, range(101, 150), slice(0, 81))
