"""A frame serves again only where it would be made again, and a kept one changes no bit."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from operator import itemgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.kernels.torch_plan import Frame, Shape, make_frame
from kvass.common.pool.memory import SlotMemory

BLOCK, KEY_TILE, LONGEST, TABLES, SLOTS = 16, 256, 530, 5, 50
SHAPE = Shape(
    query_heads=6, kv_heads=2, head_dim=32, block_tokens=BLOCK, key_tile=KEY_TILE, row_alignment=4
)
Rows = list[tuple[int, int]]  # (table, position)
positions = st.sampled_from([0, 254, 255, 256, 510, 511, 512]) | st.integers(0, LONGEST - 9)
streams = st.lists(
    st.tuples(st.integers(0, TABLES - 1), positions),
    min_size=1,
    max_size=TABLES,
    unique_by=itemgetter(0),
)
prompts = st.lists(st.tuples(st.integers(0, TABLES - 1), positions), max_size=12)


def frame_of(rows: Rows) -> Frame:
    return make_frame(SHAPE, *arrays(rows))


def arrays(rows: Rows) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    table, position = np.array(rows, np.int64).reshape(-1, 2).T.copy()
    return table, position


def leaves(value: object) -> object:
    """Return a plan's numbers, in lists."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [list(value.shape), value.tolist()]
    if is_dataclass(value):
        return [leaves(getattr(value, each.name)) for each in fields(value)]
    return [leaves(each) for each in value] if isinstance(value, tuple) else value


@given(streams | prompts, st.data())
@settings(max_examples=300, deadline=None)
def test_what_a_frame_fits_has_the_same_frame(rows: Rows, data: st.DataObject) -> None:
    frame = frame_of(rows)
    grown = [(table, position + 1) for table, position in rows]
    other = data.draw(st.just(grown) | st.permutations(grown) | streams | prompts)
    if frame.fits(SHAPE, *arrays(other)):
        assert leaves(frame_of(other)) == leaves(frame)


def test_a_stream_s_frame_is_made_twice_in_a_key_tile() -> None:
    """While its last tile fills, and once where the mask of a full one would hide nothing."""
    frame, made = frame_of([(0, 300), (3, 20)]), []
    for step in range(400):
        rows = [(0, 300 + step), (3, 20 + step)]
        if not frame.fits(SHAPE, *arrays(rows)):
            frame = frame_of(rows)
            made.append(step)
    ends = [511 - 300, 255 - 20]
    assert made == sorted([*ends, *(end + 1 for end in ends)])
    assert not frame_of([(0, 7), (0, 8)]).fits(SHAPE, *arrays([(0, 7), (0, 8)]))


@cache
def filled(kv_dtype: KvDtype) -> tuple[TorchPagedKv, TorchPagedKv]:
    """Two users of one pool."""
    layout = BlockLayout(1, SHAPE.kv_heads, SHAPE.head_dim, BLOCK, kv_dtype)
    memory = SlotMemory(layout, SLOTS)
    kept, fresh = (TorchPagedKv(memory, layout, SHAPE.query_heads) for _ in range(2))
    tokens = torch.arange(SLOTS * BLOCK)
    rows = torch.randn(2, len(tokens), SHAPE.kv_heads, SHAPE.head_dim)
    kept.append(0, rows[0], rows[1], tokens // BLOCK, tokens % BLOCK)
    return kept, fresh


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@given(st.data())
@settings(max_examples=20, deadline=None)
def test_kept_frames_change_no_bit(kv_dtype: KvDtype, data: st.DataObject) -> None:
    """Streams step, between them a prompt's chunk; slots change as a pool lets them change."""
    kept, fresh = filled(kv_dtype)
    random = data.draw(st.randoms(use_true_random=False))
    blocks = -(-LONGEST // BLOCK)
    tables = torch.tensor([random.sample(range(SLOTS), blocks) for _ in range(TABLES)])
    nothing = torch.empty(0, dtype=torch.int64)
    rows = data.draw(streams)
    kept.plan(tables, nothing, nothing)
    for action in data.draw(st.lists(st.sampled_from(["grow", "grow", "slot", "chunk"]))):
        if action == "grow":
            rows = [(table, min(position + 1, LONGEST - 1)) for table, position in rows]
        elif action == "slot":
            tables[random.randrange(TABLES), random.randrange(blocks)] = random.randrange(SLOTS)
        chunk = [(0, p) for p in range(random.randrange(1, LONGEST))] if action == "chunk" else rows
        table, position = (torch.from_numpy(each) for each in arrays(chunk))
        q = torch.randn(len(chunk), SHAPE.query_heads, SHAPE.head_dim)
        fresh.plan(tables, nothing, nothing)  # now it has the frame of no rows, and no other
        expected = fresh.attend(0, q, fresh.plan(tables, table, position))
        found = kept.attend(0, q, kept.plan(tables, table, position))
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
