"""Append and attention over a paged pool: right, and the same bits in any company."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.common.block import KV_DTYPES, BlockLayout, KvDtype
from kvass.common.errors import Invalid
from kvass.common.kernels.formats import CODE_DTYPES, decode
from kvass.common.kernels.numerics import ROTATED
from kvass.common.kernels.rotation import hadamard, multiply_rows
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.torch_paged import Step, TorchPagedKv
from kvass.common.kernels.torch_row_counts import find_alignment, padded_rows
from kvass.common.pages import HUGE_PAGE
from kvass.common.pool.memory import SlotMemory

SLOTS = 160


@dataclass
class Pool:
    """A pool full of garbage, and the dense K and V of each sequence stored in it."""

    layout: BlockLayout
    memory: SlotMemory
    kv: TorchPagedKv
    tables: torch.Tensor
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def make_pool(layout: BlockLayout, query_heads: int, lengths: list[int], seed: int) -> Pool:
    """Store sequences of these lengths in slots in random order; all other bytes are NaNs."""
    generator = torch.Generator().manual_seed(seed)
    memory = SlotMemory(layout, SLOTS)
    memory.array.fill(0xFF)
    kv = TorchPagedKv(memory, layout, query_heads)
    blocks = -(-max(lengths) // layout.block_tokens)
    order = torch.randperm(SLOTS, generator=generator)
    assert blocks * len(lengths) <= SLOTS
    pool = Pool(layout, memory, kv, order[: blocks * len(lengths)].view(len(lengths), -1), [], [])
    # The content depends on the sequence only, so that pools of other orders hold the same.
    for sequence, length in enumerate(lengths):
        content = torch.Generator().manual_seed(1000 + sequence)
        size = (layout.layers, length, layout.kv_heads, layout.head_dim)
        pool.k.append(torch.randn(size, generator=content))
        pool.v.append(torch.randn(size, generator=content))
        store(pool, sequence, 0, length)
    return pool


def store(pool: Pool, sequence: int, first: int, stop: int) -> None:
    positions = torch.arange(first, stop)
    slots = pool.tables[sequence][positions // pool.layout.block_tokens]
    offsets = positions % pool.layout.block_tokens
    for layer in range(pool.layout.layers):
        k, v = pool.k[sequence][layer, first:stop], pool.v[sequence][layer, first:stop]
        pool.kv.append(layer, k, v, slots, offsets)


def queries_of(pool: Pool, sequence: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sequence * 100_000 + position)
    return torch.randn(pool.kv.shape.query_heads, pool.layout.head_dim, generator=generator)


def attend(pool: Pool, rows: list[tuple[int, int]], layer: int = 0) -> torch.Tensor:
    """Attend in one step for rows (sequence, position)."""
    q = torch.stack([queries_of(pool, *row) for row in rows])
    sequences = torch.tensor([row[0] for row in rows])
    plan = pool.kv.plan(pool.tables, sequences, torch.tensor([row[1] for row in rows]))
    return pool.kv.attend(layer, q, plan)


def stored_rows(
    memory: SlotMemory, layout: BlockLayout, table: torch.Tensor, length: int, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read K and V [length, H, D] by `BlockLayout`'s offsets, row by row, rotation undone."""
    rotation = hadamard(layout.head_dim)
    found = []
    for value in (False, True):
        rows = torch.empty(length, layout.kv_heads, layout.head_dim)
        for position in range(length):
            block = memory.tensor[int(table[position // layout.block_tokens])]
            token = position % layout.block_tokens
            for head in range(layout.kv_heads):
                start = layout.code_offset(head, layer, value, token)
                codes = block[start : start + layout.row_size]
                scale = None
                if layout.has_scales:
                    parts = range(layout.scale_parts)
                    at = [layout.scale_offset(head, layer, value, token, part) for part in parts]
                    scale = torch.cat([block[each : each + 2] for each in at]).view(torch.bfloat16)
                rows[position, head] = decode(codes.view(CODE_DTYPES[layout.kv_dtype]), scale)
        rotated = ("v" if value else "k") in ROTATED[layout.kv_dtype]
        found.append(multiply_rows(rows, rotation) if rotated else rows)
    return found[0], found[1]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int) -> torch.Tensor:
    """Dense attention of one row in double precision: q [Q, D], k and v [tokens, H, D]."""
    share = q.shape[0] // k.shape[1]
    keys = k[: position + 1].double().repeat_interleave(share, 1)
    values = v[: position + 1].double().repeat_interleave(share, 1)
    scores = torch.einsum("qd,tqd->qt", q.double(), keys) * q.shape[1] ** -0.5
    return torch.einsum("qt,tqd->qd", scores.softmax(-1), values)


TOLERANCE: dict[KvDtype, float] = {"bf16": 4e-3, "int8": 1.5e-2, "int4": 0.15, "fp8": 6e-2}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "depth", "block_tokens", "groups"),
    [
        (3, 3, 64, 16, 1),
        (9, 3, 64, 16, 1),
        (8, 2, 80, 16, 2),
        (16, 2, 96, 32, 1),
        (8, 8, 128, 8, 4),
        (6, 2, 64, 5, 2),
        (2, 1, 16, 96, 1),
    ],
)
def test_attention_matches_a_dense_reference(
    kv_dtype: KvDtype, query_heads: int, kv_heads: int, depth: int, block_tokens: int, groups: int
) -> None:
    layout = BlockLayout(2, kv_heads, depth, block_tokens, kv_dtype, groups)
    lengths = [1, 7, min(280, 24 * block_tokens - 3), 33]
    blocks = -(-max(lengths) // block_tokens)
    lengths = lengths if blocks * len(lengths) <= SLOTS else [1, lengths[2] // 2]
    pool = make_pool(layout, query_heads, lengths, seed=3)
    rows = [(s, p) for s, length in enumerate(lengths) for p in range(0, length, 3)]
    rows += [(s, length - 1) for s, length in enumerate(lengths)]
    for layer in range(layout.layers):
        out = attend(pool, rows, layer)
        stored = [
            stored_rows(pool.memory, layout, pool.tables[s], length, layer)
            for s, length in enumerate(lengths)
        ]
        for row, (sequence, position) in zip(out, rows, strict=True):
            q = queries_of(pool, sequence, position)
            exact = reference(q, *stored[sequence], position)
            assert torch.allclose(row.double(), exact, atol=3e-5, rtol=1e-4)
            dense = reference(q, pool.k[sequence][layer], pool.v[sequence][layer], position)
            assert float((row - dense).norm() / dense.norm()) < 2 * TOLERANCE[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_long_and_short_contexts_in_one_step(kv_dtype: KvDtype) -> None:
    """Contexts below, at and beyond the key tile, single rows and tiles, all at once."""
    layout = BlockLayout(1, 2, 64, 16, kv_dtype)
    lengths = [1400, 256, 257, 3]
    memory = SlotMemory(layout, 200)
    memory.array.fill(0xFF)
    kv = TorchPagedKv(memory, layout, 6)
    tables = torch.randperm(200)[:4].view(4, 1).repeat(1, 88)
    free = [slot for slot in torch.randperm(200).tolist() if slot not in tables[:, 0]]
    for sequence, length in enumerate(lengths):
        for block in range(1, -(-length // 16)):
            tables[sequence, block] = free.pop()
    pool = Pool(layout, memory, kv, tables, [], [])
    for sequence, length in enumerate(lengths):
        pool.k.append(torch.randn(1, length, 2, 64))
        pool.v.append(torch.randn(1, length, 2, 64))
        store(pool, sequence, 0, length)
    rows = [(0, p) for p in range(700, 1400)] + [(1, 255), (2, 256), (3, 2)]
    rows += [(1, p) for p in range(200, 240)]
    out = attend(pool, rows)
    for index in [0, 1, 67, 68, 324, 699, 700, 701, 702, 710, 742]:
        sequence, position = rows[index]
        k, v = pool.k[sequence][0], pool.v[sequence][0]
        dense = reference(queries_of(pool, sequence, position), k, v, position)
        error = float((out[index] - dense).norm() / dense.norm())
        assert error < 2 * TOLERANCE[kv_dtype], (sequence, position, error)


@pytest.mark.parametrize("ends", [(29, 255, 57), (255, 3), (3, 255, 255, 9), (255, 511, 10, 600)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_context_that_fills_its_key_tiles_beside_others(
    ends: tuple[int, ...], count: int
) -> None:
    """A tile without a mask is computed before those with one; each must keep its own result."""
    layout = BlockLayout(1, 3, 64, 16, "fp8")
    pool = make_pool(layout, 9, [end + 1 for end in ends], seed=3)
    rows = [(s, p) for s, end in enumerate(ends) for p in range(end + 1 - count, end + 1)]
    out = attend(pool, rows)
    for row, (sequence, position) in zip(out, rows, strict=True):
        k, v = pool.k[sequence][0], pool.v[sequence][0]
        dense = reference(queries_of(pool, sequence, position), k, v, position)
        assert float((row - dense).norm() / dense.norm()) < 2 * TOLERANCE["fp8"]


BIT_LENGTHS = [530, 300, 257, 256, 40, 5]
TILE_ENDS = [0, 1, 31, 32, 254, 255, 256, 257, 511, 512]  # of key tiles of 256, and beside them


@given(st.data(), st.sampled_from(KV_DTYPES), st.sampled_from([(9, 3), (4, 1), (2, 2), (7, 1)]))
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_in_any_company_and_slots(
    data: st.DataObject, kv_dtype: KvDtype, heads: tuple[int, int]
) -> None:
    layout = BlockLayout(1, heads[1], 32, 32, kv_dtype)
    first = make_pool(layout, heads[0], BIT_LENGTHS[:5], seed=1)
    other = make_pool(layout, heads[0], BIT_LENGTHS[:5], seed=data.draw(st.integers(2, 99)))
    assert first.kv.deterministic
    sequences = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
    rows = []
    for sequence in sequences:
        length = BIT_LENGTHS[sequence]
        ends = st.sampled_from([end for end in TILE_ENDS if end < length])
        start = data.draw(ends | st.integers(0, length - 1))
        count = data.draw(st.sampled_from([1, 1, 2, 5, 16, 70, 128, 200, 530]))
        rows += [(sequence, p) for p in range(start, min(length, start + count))]
    together = attend(first, rows)
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8, unique=True))
    few = attend(other, [rows[pick] for pick in picks])
    assert torch.equal(few.view(torch.int32), together[picks].view(torch.int32))
    alone = attend(other, [rows[picks[0]]])
    assert torch.equal(alone[0].view(torch.int32), together[picks[0]].view(torch.int32))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_chunks_of_a_prefill_change_no_bit_of_outputs_or_blocks(kv_dtype: KvDtype) -> None:
    """Whole, in chunks of odd sizes, or token by token: the same outputs and the same bytes."""
    layout = BlockLayout(1, 3, 64, 16, kv_dtype)
    length = 330
    found = []
    for step in (length, 97, 128, 1):
        pool = make_pool(layout, 9, [length], seed=step)
        pool.memory.array.fill(0xFF)
        parts = []
        for first in range(0, length, step):
            stop = min(length, first + step)
            store(pool, 0, first, stop)
            if step > 1 or first % 61 == 0 or stop == length:
                parts.append(attend(pool, [(0, p) for p in range(first, stop)]))
        found.append((torch.cat(parts), pool.memory.tensor[pool.tables[0]]))
    (whole, stored), *others = found
    for outputs, blocks in others:
        picks = range(length) if len(outputs) == length else [*range(0, length, 61), length - 1]
        assert torch.equal(outputs, whole[list(picks)])
        assert torch.equal(blocks, stored)


def test_rows_of_a_step_may_repeat_and_come_in_any_order() -> None:
    layout = BlockLayout(1, 2, 32, 16, "fp8")
    pool = make_pool(layout, 4, [100, 60], seed=1)
    rows = [(1, 59), (0, 99), (0, 3), (1, 0), (0, 99), (0, 50)]
    out = attend(pool, rows)
    assert torch.equal(out[1], out[4])
    for index, row in enumerate(rows):
        assert torch.equal(out[index], attend(pool, [row])[0])


def test_append_touches_no_byte_of_other_tokens() -> None:
    for kv_dtype in KV_DTYPES:
        layout = BlockLayout(2, 2, 16 if kv_dtype == "int4" else 20, 6, kv_dtype, 2)
        memory = SlotMemory(layout, 4)
        memory.array.fill(0xA5)
        kv = TorchPagedKv(memory, layout, 2)
        rows = torch.randn(2, 2, layout.head_dim) + 9
        kv.append(1, rows, -rows, torch.tensor([3, 1]), torch.tensor([5, 0]))
        changed = memory.tensor != 0xA5
        allowed = torch.zeros_like(changed)
        for slot, token in ((3, 5), (1, 0)):
            for value in (False, True):
                for head in range(2):
                    at = layout.code_offset(head, 1, value, token)
                    allowed[slot, at : at + layout.row_size] = True
                    for part in range(layout.scale_parts):
                        at = layout.scale_offset(head, 1, value, token, part)
                        allowed[slot, at : at + 2] = True
        assert not bool((changed & ~allowed).any())
        assert int((changed & allowed).sum()) > int(allowed.sum()) * 0.9


@given(
    st.sampled_from(KV_DTYPES), st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.integers(1, 70)
)
@settings(max_examples=12, deadline=None)
def test_blocks_written_by_four_ranks_are_read_by_two_and_by_one(
    kv_dtype: KvDtype, share: int, layers: int, length: int
) -> None:
    """Tensor parallelism 4 writes, 2 and 1 read: byte ranges of `rank_groups`, no re-layout."""
    heads, depth, tokens = 4 * share, 32, 8
    whole = BlockLayout(layers, heads, depth, tokens, kv_dtype, 4)
    generator = torch.Generator().manual_seed(length)
    k = torch.randn(layers, length, heads, depth, generator=generator)
    v = torch.randn(layers, length, heads, depth, generator=generator)
    positions = torch.arange(length)
    blocks = -(-length // tokens)
    written = torch.zeros(blocks, whole.block_size, dtype=torch.uint8)

    def of_rank(rank: int, degree: int) -> tuple[BlockLayout, slice, slice]:
        """A rank's own pool layout, its KV heads, and its byte range in a block."""
        groups = whole.rank_groups(rank, degree)
        own = BlockLayout(
            layers, len(groups) * whole.group_heads, depth, tokens, kv_dtype, len(groups)
        )
        first = groups.start * whole.group_heads
        start = whole.group_offset(groups.start)
        return own, slice(first, first + own.kv_heads), slice(start, start + own.block_size)

    for rank in range(4):
        own, mine, span = of_rank(rank, 4)
        memory = SlotMemory(own, blocks)
        kv = TorchPagedKv(memory, own, own.kv_heads)
        for layer in range(layers):
            k_rows, v_rows = k[layer][:, mine], v[layer][:, mine]
            kv.append(layer, k_rows, v_rows, positions // tokens, positions % tokens)
        written[:, span] = memory.tensor
    q = torch.randn(1, heads, depth, generator=generator)
    outputs = []
    for degree in (4, 2, 1):
        parts = []
        for rank in range(degree):
            own, mine, span = of_rank(rank, degree)
            memory = SlotMemory(own, blocks)
            memory.tensor.copy_(written[:, span])
            kv = TorchPagedKv(memory, own, own.kv_heads)
            table, last = torch.arange(blocks)[None], torch.tensor([length - 1])
            plan = kv.plan(table, torch.zeros(1, dtype=torch.int64), last)
            parts.append(kv.attend(layers - 1, q[:, mine].contiguous(), plan))
            stored = stored_rows(memory, own, table[0], length, 0)
            error = (stored[0] - k[0][:, mine]).norm() / k[0].norm()
            assert float(error) < TOLERANCE[kv_dtype]
        outputs.append(torch.cat(parts, 1))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_a_step_without_rows_gives_nothing() -> None:
    pool = make_pool(BlockLayout(1, 1, 16, 16, "fp8"), 1, [4], seed=1)
    empty = torch.empty(0, dtype=torch.int64)
    out = pool.kv.attend(0, torch.empty(0, 1, 16), pool.kv.plan(pool.tables, empty, empty))
    assert out.shape == (0, 1, 16)


def test_the_implementation_fits_the_seam_and_refuses_other_models() -> None:
    layout = BlockLayout(1, 3, 64, 16, "fp8")
    memory = SlotMemory(layout, 1)
    kernels: PagedKv[Step] = TorchPagedKv(memory, layout, 9)
    assert kernels is not None
    with pytest.raises(Invalid, match="8 query heads"):
        TorchPagedKv(memory, layout, 8)
    odd = BlockLayout(1, 1, 7, 3, "int8")
    with pytest.raises(Invalid, match="odd number"):
        TorchPagedKv(SlotMemory(odd, 1), odd, 1)


def test_row_counts_are_found_and_cover_what_attention_uses() -> None:
    for share in (1, 3, 4, 7, 8):
        assert find_alignment(tuple(share * rows for rows in (1, 8, 32, 64, 128)), 64, 256)
    assert [padded_rows(rows, 4) for rows in (1, 4, 5)] == [4, 4, 8]


def test_slot_memory_is_aligned_zero_and_shared_by_its_views() -> None:
    layout = BlockLayout(30, 3, 64, 16, "fp8")
    memory = SlotMemory(layout, 3)
    assert memory.address % HUGE_PAGE == 0 and memory.size == 3 * 192_000
    assert memory.addresses([2, 0]).tolist() == [memory.array[i].ctypes.data for i in (2, 0)]
    assert memory.tensor.data_ptr() == memory.address
    assert not memory.array.any()
    memory.array[1, 5] = 7
    assert int(memory.tensor[1, 5]) == 7
    held = memory.array[1]
    memory.close()
    memory.close()
    assert held[5] == 0 and memory.array.size == 0
    with pytest.raises(Invalid, match="at least one slot"):
        SlotMemory(layout, 0)


@pytest.mark.parametrize("width", [3, 16, 300, 5000])
def test_index_add_adds_in_the_order_of_its_index(width: int) -> None:
    """What merging relies on: torch promises it for no device, so it is looked at."""
    generator = torch.Generator().manual_seed(width)
    target = torch.randint(0, 5, (64,), generator=generator)
    parts = torch.randn(64, width, generator=generator) * 10.0 ** torch.arange(64).fmod(7)[:, None]
    added = torch.zeros(5, width).index_add_(0, target, parts)
    expected = torch.zeros(5, width)
    for row, place in zip(parts, target.tolist(), strict=True):
        expected[place] += row
    assert torch.equal(added, expected)
