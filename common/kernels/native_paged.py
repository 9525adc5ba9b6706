"""The compiled implementation of the kernels seam: `common/native/src/attention.cpp`, `append.cpp`.

One call a layer for append and one for attend, with memory handed over by address: k, v and q are
read where a product left them. A plan is two tensors' addresses and how the step is cut, which the
library decides once a step.

*A row's bits depend on its query, its position and the stored keys before it only*, by the order of
every sum, on any number of threads; what is stored elsewhere, NaN or not, changes none. Levels have
the same bits but two: x86 without FMA, and avx512bf16, whose products are of bf16 numbers with
float32 sums (`pairs.h`). `bits` is a hash of results, for `model/device_kind.py`. One thread at a
time may use an instance: it owns the memory that partial results are in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.block import KV_DTYPES, BlockLayout
from kvass.common.errors import Invalid
from kvass.common.kernels.numerics import ROTATED
from kvass.common.kernels.turn import Turn
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory

# Of the library (paged.h, attention.cpp): registers of 16 numbers, and room on a thread's stack.
_LANES = 16
_HEAD_MAX = 256
_QUERIES_MAX = 192
_NUMBERS_MAX = 24_576
_FORMATS = {"fp8": 0, "int8": 1, "bf16": 2, "int4": 3}
_DTYPES = (torch.float32, torch.bfloat16)

_I64 = ctypes.c_int64
_P = ctypes.c_void_p


class _Pool(ctypes.Structure):
    _fields_ = [
        ("memory", _P),
        ("block_size", _I64),
        ("group_size", _I64),
        ("layer_size", _I64),
        ("record_size", _I64),
        ("codes_size", _I64),
        ("row_size", _I64),
        ("scale_parts", _I64),
        ("block_tokens", _I64),
        ("head_dim", _I64),
        ("kv_heads", _I64),
        ("group_heads", _I64),
        ("query_heads", _I64),
        ("format", _I64),
        ("rotation", _I64),
        ("key_rotated", _I64),
        ("value_rotated", _I64),
        ("window", _I64),
        ("soft_cap", ctypes.c_double),
        ("key_offsets", _P),
        ("key_carry", _P),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("tables", _P),
        ("table_width", _I64),
        ("row_table", _P),
        ("row_position", _P),
        ("rows", _I64),
        ("threads", _I64),
        ("groups", _P),
        ("shares", _P),
        ("left", _P),
        ("partials", _P),
        ("group_count", _I64),
        ("share_count", _I64),
        ("partial_count", _I64),
    ]


class _Rows(ctypes.Structure):
    _fields_ = [("data", _P), ("step", _I64), ("is_bf16", _I64)]


class _Turn(ctypes.Structure):
    _fields_ = [("cosine", _P), ("sine", _P)]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One step as the library has it, with what keeps its addresses alive."""

    step: _Step
    rows: int
    held: tuple[torch.Tensor | NDArray[np.int64], ...]


def unsupported(layout: BlockLayout, query_heads: int) -> str:
    """Say why the library cannot serve a layout; empty when it can."""
    share = query_heads // layout.kv_heads
    if layout.head_dim % _LANES or layout.head_dim > _HEAD_MAX:
        return f"head_dim {layout.head_dim} is no multiple of {_LANES} up to {_HEAD_MAX}"
    if share > _QUERIES_MAX or share * layout.head_dim > _NUMBERS_MAX:
        return f"{share} query heads a KV head are more than fit"
    return ""


class NativePagedKv:
    """A paged pool's memory with the kernels that read and write it (`kernels.seam.PagedKv`).

    Mutable fields: the pool's memory, which the caller owns, and `_partials`.
    """

    deterministic = True

    def __init__(
        self,
        memory: SlotMemory,
        layout: BlockLayout,
        query_heads: int,
        key_offsets: torch.Tensor | None = None,
        key_carry: torch.Tensor | None = None,
        *,
        threads: int | None = None,
        level: str | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> None:
        """`key_offsets` float32 [layers, H, D] are taken off K, turned, before it is rotated, and
        its numbers are rounded in turn by `key_carry` [layers, H, D, D] (`kernels.formats`).
        `threads` and `level` default to this process's. Rows attend to the last `window`
        positions, and scores are bounded by soft_cap · tanh(score / soft_cap); 0: neither.
        """
        assert layout.has_scales or (key_offsets is None and key_carry is None), layout
        if query_heads % layout.kv_heads:
            raise Invalid(
                f"{query_heads} query heads are no multiple of {layout.kv_heads} KV heads"
            )
        if why := unsupported(layout, query_heads):
            raise Invalid(f"compiled attention: {why}")
        if key_offsets is not None and soft_cap:
            raise Invalid("a soft-cap sees K's offsets: q times them would have to be added back")
        at_level = level or library.level()
        if at_level is None:
            raise Invalid(f"compiled attention: {library.missing() or 'switched off'}")
        library.check_sizes("kvass_attention_sizes", at_level, _Pool, _Step, _Rows, _Turn)
        self.reason = f"attention compiled for {at_level}"
        self._threads = threads or torch.get_num_threads()
        self._memory = memory  # its mapping must outlive the address below
        size = (layout.layers, layout.kv_heads, layout.head_dim)
        self._offsets = _floats(key_offsets, size)  # so must these
        self._carry = _floats(key_carry, (*size, layout.head_dim))
        self._heads = (query_heads, layout.kv_heads, layout.head_dim)
        self._block_tokens = layout.block_tokens
        self._pool = _Pool(
            memory=memory.address,
            block_size=layout.block_size,
            group_size=layout.group_size,
            layer_size=layout.layer_size,
            record_size=layout.record_size,
            codes_size=layout.codes_size,
            row_size=layout.row_size,
            scale_parts=layout.scale_parts,
            block_tokens=layout.block_tokens,
            head_dim=layout.head_dim,
            kv_heads=layout.kv_heads,
            group_heads=layout.group_heads,
            query_heads=query_heads,
            format=_FORMATS[layout.kv_dtype],
            rotation=layout.head_dim & -layout.head_dim,
            key_rotated="k" in ROTATED[layout.kv_dtype],
            value_rotated="v" in ROTATED[layout.kv_dtype],
            window=window,
            soft_cap=soft_cap,
            key_offsets=None if self._offsets is None else self._offsets.data_ptr(),
            key_carry=None if self._carry is None else self._carry.data_ptr(),
        )
        self._partials = torch.empty(0)
        self._level = at_level
        self._split = int(_function("kvass_split", at_level, _I64)())
        self._plan = _function("kvass_plan_attention", at_level, None, _P, _P)
        self._attend = _function("kvass_attend", at_level, None, _P, _P, _I64, _P, _P, _P)
        self._append = _function(
            "kvass_append", at_level, None, _P, _I64, _I64, _P, _P, _P, _P, _P, _I64
        )

    @property
    def pool_address(self) -> int:
        """Where the library's description of the pool is, for its other functions."""
        return ctypes.addressof(self._pool)

    @property
    def bits(self) -> str:
        """A name for the bits of this arithmetic."""
        return _bits(self._level)

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> NativePlan:
        """Prepare one step, once for all layers; arguments as in the seam."""
        tables, row_table, row_position = (
            each.contiguous() for each in (tables, row_table, row_position)
        )
        rows, kv_heads = row_table.shape[0], self._heads[1]
        splits = tables.shape[1] * self._block_tokens // self._split + 1
        # Of C's structures: groups of 5 words, shares of 2, and 32-bit counts of splits.
        room = np.empty(rows * (5 + 2 * splits + kv_heads), dtype=np.int64)
        step = _Step(
            tables=tables.data_ptr(),
            table_width=tables.shape[1],
            row_table=row_table.data_ptr(),
            row_position=row_position.data_ptr(),
            rows=rows,
            threads=self._threads,
            groups=room.ctypes.data,
            shares=room.ctypes.data + rows * 5 * 8,
            left=room.ctypes.data + rows * (5 + 2 * splits) * 8,
        )
        self._plan(ctypes.byref(self._pool), ctypes.byref(step))
        if self._partials.numel() < step.partial_count:
            self._partials = torch.empty(step.partial_count)
        step.partials = self._partials.data_ptr()
        held = (tables, row_table, row_position, room, self._partials)
        return NativePlan(step, rows, held)

    def append(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        offsets: torch.Tensor,
        turn: Turn | None = None,
    ) -> None:
        """Quantise and store k and v [M, H, D] at token `offsets` of `slots`, int64 [M]."""
        k, v = _in_rows(k), _in_rows(v)
        count = k.shape[0]
        assert k.shape == v.shape == (count, *self._heads[1:]), (k.shape, v.shape)
        assert slots.shape == offsets.shape == (count,), (slots.shape, offsets.shape)
        slots, offsets = slots.contiguous(), offsets.contiguous()
        self._append(
            *(ctypes.byref(self._pool), layer, count, _rows(k), _rows(v), _turn(turn, k)),
            *(slots.data_ptr(), offsets.data_ptr(), self._threads),
        )

    def attend(
        self, layer: int, q: torch.Tensor, plan: NativePlan, turn: Turn | None = None
    ) -> torch.Tensor:
        """Return attention outputs float32 [N, Q, D] for queries [N, Q, D]."""
        assert q.shape == (plan.rows, self._heads[0], self._heads[2]), (q.shape, plan.rows)
        q = _in_rows(q)
        out = torch.empty(q.shape, dtype=torch.float32)
        self._attend(
            *(ctypes.byref(self._pool), ctypes.byref(plan.step), layer),
            *(_rows(q), _turn(turn, q), out.data_ptr()),
        )
        return out


def _function(name: str, level: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return library.function_at(name, level, result, *arguments)


def _floats(given: torch.Tensor | None, size: tuple[int, ...]) -> torch.Tensor | None:
    if given is None:
        return None
    assert given.dtype == torch.float32 and given.shape == size, (given.dtype, given.shape, size)
    return given.contiguous()


def _in_rows(heads: torch.Tensor) -> torch.Tensor:
    """Return heads [N, H, D] as they are if each row's heads follow each other, else a copy."""
    assert heads.dtype in _DTYPES, heads.dtype
    if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2]:
        return heads
    return heads.contiguous()


def _rows(heads: torch.Tensor) -> Any:
    return ctypes.byref(_Rows(heads.data_ptr(), heads.stride(0), heads.dtype == torch.bfloat16))


def _turn(turn: Turn | None, heads: torch.Tensor) -> Any:
    if turn is None:
        return None
    cosine, sine = turn
    size = (heads.shape[0], heads.shape[2] // 2)
    assert cosine.shape == sine.shape == size, (cosine.shape, size)
    assert cosine.is_contiguous() and sine.is_contiguous()
    return ctypes.byref(_Turn(cosine.data_ptr(), sine.data_ptr()))


def _bits(level: str) -> str:
    """Hash what append and attend make of numbers that exact operations made."""
    digest = blake2b(digest_size=8)
    count, kv_heads, share, depth, tokens = 1100, 1, 2, 80, 16
    numbers = torch.arange(3 * count * depth, dtype=torch.float32) * 7919 % 10_007
    k, v, angles = ((numbers - 5_003) / 2048).view(3, count, kv_heads, depth)
    turn = Turn(*(each.contiguous() for each in angles[:, 0].chunk(2, dim=-1)))
    rows = torch.arange(count)
    table, last = rows[: -(-count // tokens)], torch.tensor([3, 77, count - 1])
    for kv_dtype in KV_DTYPES:
        layout = BlockLayout(1, kv_heads, depth, tokens, kv_dtype)
        memory = SlotMemory(layout, len(table))
        kv = NativePagedKv(memory, layout, share, level=level)
        kv.append(0, k, v, rows // tokens, rows % tokens, turn)
        plan = kv.plan(table[None], torch.zeros_like(last), last)
        q = v[last].expand(-1, share, -1)
        digest.update(memory.array.data)
        digest.update(kv.attend(0, q, plan, turn.of_rows(last)).numpy().data)
    return digest.hexdigest()
