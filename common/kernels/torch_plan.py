"""How one step's attention is cut into pieces: row tiles, key tiles, groups and chunks. Pure.

    row tile   up to 128 rows of one table, padded to one of `ROW_TILES` sizes by repeating its last
    key tile   a fixed run of `key_tile` positions, at absolute multiples of it
    item       a (row tile, key tile) pair with something to attend to: the unit of work
    chunk      items that are computed at once; bounds the memory of scores and of decoded keys
    group      whole row tiles of one size with all their items; bounds the memory of its results
    frame      all groups: what a plan is without the slots and the masks of its items

A stream's steps differ in the slots and masks alone, but for two in `key_tile`; so a frame says
which steps it `fits`, and is made again for the others only.

An item's result depends on its queries, positions and stored keys only, and a row's items are
summed in the order of their key tiles; so how items are grouped changes no bit of any row. It knows
nothing of layers and values: a plan serves every layer of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.kernels.torch_row_counts import padded_rows

KEY_TILE = 256  # measured: smaller tiles lose to the overhead of an operation, larger to masking
ROW_TILES = (1, 8, 32, 64, 128)
# Measured (two cores with 1 MiB of L2 each, 32 MiB of L3): decoding wants chunks near the L2, the
# products of prefill want several items for two threads to share.
CHUNK_DECODED_FLOATS = 1 << 20
CHUNK_SCORE_FLOATS = 2 << 20
GROUP_FLOATS = 4 << 20  # of partial outputs
MASKED = (
    -1.0e30
)  # finite, so that a row with nothing to attend to in a tile gives weight 0, not NaN

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan needs to know of the model and its pool."""

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    key_tile: int
    row_alignment: int

    @property
    def queries_per_head(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def tile_blocks(self) -> int:
        return self.key_tile // self.block_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Items computed at once: items `start` to `start + count` of their group.

    The last `masked` items reach beyond some row's context. `queries` int64 [count * H * M] are
    indices into [N * Q].
    """

    start: int
    count: int
    masked: int
    queries: torch.Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Row tiles of `rows` queries a KV head (M) each, with all their items.

    `item_tile` int64 [items] says which row tile an item belongs to; `tile_items` int64
    [tiles * depth] lists each tile's items, the first one repeated up to the deepest tile's depth.
    """

    rows: int
    tiles: int
    items: int
    depth: int
    item_tile: torch.Tensor
    tile_items: torch.Tensor
    chunks: tuple[Chunk, ...]
    places: _ItemPlaces


class Contents(NamedTuple):
    """What a chunk's items read in one step, and what they must not see.

    `slots` int64 [items * blocks of a key tile]; past the context, its last slot again. For the
    masked items, `hidden` bool [masked, 1, M, T] is what lies beyond each row's own position;
    `keep` int32 [masked, 1, T, 1] is 0 beyond the row tile's last position, where slots hold
    garbage, and -1 up to it.
    """

    slots: torch.Tensor
    hidden: torch.Tensor
    keep: torch.Tensor


@dataclass(frozen=True, slots=True)
class Frame:
    """One step's attention, but for its `contents`.

    `place` int64 [N * Q] finds each query's output among the groups'. `key` is what the frame was
    made from: None if a table has several rows, for their order and masks would belong to it.
    """

    row_count: int
    groups: tuple[Group, ...]
    place: torch.Tensor
    key: bytes | None

    def fits(self, shape: Shape, row_table: Ints, row_position: Ints) -> bool:
        """Whether `make_frame` would make this frame again for these rows."""
        return self.key is not None and self.key == _frame_key(shape, row_table, row_position)


@dataclass(frozen=True, slots=True)
class _ItemPlaces:
    """Where a group's items find their slots and positions.

    Of each item: its `table` [items, 1], its `blocks` there [items, blocks of a key tile], and the
    `last` row of its tile. Of the masked ones alone, of all chunks in turn: the last row of their
    tile (`masked_last`), their padded rows (`masked_rows` [masked, M]) and the positions of their
    keys (`key_positions` [masked, T]).
    """

    table: Ints
    blocks: Ints
    last: Ints
    masked_last: Ints
    masked_rows: Ints
    key_positions: Ints


@dataclass(frozen=True, slots=True)
class _RowTiles:
    """All row tiles of one size: `rows` [tiles, R] are the step's rows, the last one repeated."""

    table: Ints
    rows: Ints
    positions: Ints
    counts: Ints

    def cut(self, first: int, stop: int) -> _RowTiles:
        return _RowTiles(
            self.table[first:stop],
            self.rows[first:stop],
            self.positions[first:stop],
            self.counts[first:stop],
        )


def make_frame(shape: Shape, row_table: Ints, row_position: Ints) -> Frame:
    """Cut a step into groups and chunks; arguments as in the kernels seam's `plan`."""
    assert row_table.shape == row_position.shape
    groups: list[Group] = []
    place = np.zeros((len(row_table), shape.query_heads), dtype=np.int64)
    base = 0
    is_single = True
    for tiles in _row_tiles(row_table, row_position):
        is_single = is_single and tiles.rows.shape[1] == 1
        rows = padded_rows(tiles.rows.shape[1] * shape.queries_per_head, shape.row_alignment)
        for first, stop in _group_bounds(tiles, shape, rows):
            part = tiles.cut(first, stop)
            groups.append(_group(shape, part, rows))
            _find_places(place, shape, part, rows, base)
            base += len(part.table) * shape.kv_heads * rows
    return Frame(
        row_count=len(row_table),
        groups=tuple(groups),
        place=torch.from_numpy(place.reshape(-1)),
        key=_frame_key(shape, row_table, row_position) if is_single else None,
    )


def _frame_key(shape: Shape, row_table: Ints, row_position: Ints) -> bytes:
    """Name the tables of single rows, their key tiles, and whether these end with the rows."""
    tiles = row_position // shape.key_tile + (row_position + 1) // shape.key_tile
    return row_table.tobytes() + tiles.tobytes()


def contents(shape: Shape, group: Group, tables: Ints, row_position: Ints) -> list[Contents]:
    """Return what each of the group's chunks reads in a step that its frame fits."""
    places = group.places
    last = row_position[places.last][:, None] // shape.block_tokens
    slots = tables[places.table, np.minimum(places.blocks, last)]
    own = row_position[places.masked_rows][:, None, :, None]
    hidden = places.key_positions[:, None, None] > own
    stored = places.key_positions <= row_position[places.masked_last][:, None]
    keep = -stored.astype(np.int32)[:, None, :, None]
    found: list[Contents] = []
    masked = 0
    for chunk in group.chunks:
        items = slots[chunk.start : chunk.start + chunk.count].reshape(-1)
        part = slice(masked, masked + chunk.masked)
        masked += chunk.masked
        parts = (items, hidden[part], keep[part])
        found.append(Contents(*(torch.from_numpy(part) for part in parts)))
    return found


def _row_tiles(row_table: Ints, row_position: Ints) -> list[_RowTiles]:
    """Sort rows by table and position; cut each table's rows into tiles, one result a size."""
    if not len(row_table):
        return []
    order = np.lexsort((row_position, row_table))
    table = row_table[order]
    new_table = np.r_[True, table[1:] != table[:-1]]
    first_row = np.flatnonzero(new_table)
    rank = np.arange(len(order)) - np.repeat(first_row, np.diff(np.r_[first_row, len(order)]))
    start = np.flatnonzero(rank % ROW_TILES[-1] == 0)
    counts = np.diff(np.r_[start, len(order)])
    size = np.searchsorted(ROW_TILES, counts)
    found: list[_RowTiles] = []
    for which in np.unique(size):
        mine = np.flatnonzero(size == which)
        inside = np.minimum(np.arange(ROW_TILES[which]), counts[mine, None] - 1)
        rows = order[start[mine, None] + inside]
        found.append(_RowTiles(table[start[mine]], rows, row_position[rows], counts[mine]))
    return found


def _group_bounds(tiles: _RowTiles, shape: Shape, rows: int) -> list[tuple[int, int]]:
    """Split row tiles where their partial outputs would exceed GROUP_FLOATS."""
    items = tiles.positions[:, -1] // shape.key_tile + 1
    most = max(1, GROUP_FLOATS // (shape.kv_heads * rows * shape.head_dim))
    number = (np.cumsum(items) - items) // most
    edges = np.flatnonzero(np.r_[True, number[1:] != number[:-1], True])
    return [(int(low), int(high)) for low, high in pairwise(edges)]


def _find_places(place: Ints, shape: Shape, tiles: _RowTiles, rows: int, base: int) -> None:
    """Note where the outputs of these tiles' rows are: [tile, KV head, row, query of the head]."""
    inside = np.arange(tiles.rows.shape[1])
    tile, slot = np.nonzero(inside < tiles.counts[:, None])
    head, query = np.divmod(np.arange(shape.query_heads), shape.queries_per_head)
    row = slot[:, None] * shape.queries_per_head + query
    place[tiles.rows[tile, slot]] = base + (tile[:, None] * shape.kv_heads + head) * rows + row


def _group(shape: Shape, tiles: _RowTiles, rows: int) -> Group:
    depths = tiles.positions[:, -1] // shape.key_tile + 1
    item_tile = np.repeat(np.arange(len(depths)), depths)
    first_item = np.cumsum(depths) - depths
    key_tile = np.arange(len(item_tile)) - first_item[item_tile]
    floats = shape.kv_heads * shape.key_tile
    decoded, scores = floats * 2 * shape.head_dim, floats * rows
    chunk_items = max(1, min(CHUNK_DECODED_FLOATS // decoded, CHUNK_SCORE_FLOATS // scores))
    masked = (key_tile + 1) * shape.key_tile - 1 > tiles.positions[item_tile, 0]
    chunk = np.arange(len(item_tile)) // chunk_items
    # Masked items last in their chunk. Of one row tile these are its last ones, so that a tile's
    # items stay in the order of their key tiles.
    order = np.lexsort((masked, chunk))
    item_tile, key_tile, masked = item_tile[order], key_tile[order], masked[order]
    chunks: list[Chunk] = []
    for start in range(0, len(item_tile), chunk_items):
        part = slice(start, start + chunk_items)
        queries = torch.from_numpy(_queries(shape, tiles, rows, item_tile[part]))
        count = len(item_tile[part])
        chunks.append(Chunk(start, count, int(masked[part].sum()), queries))
    by_tile = np.argsort(item_tile, kind="stable")
    depth = int(depths.max())
    nth = np.arange(depth)
    listed = by_tile[first_item[:, None] + np.where(nth < depths[:, None], nth, 0)]
    return Group(
        rows=rows,
        tiles=len(depths),
        items=len(item_tile),
        depth=depth,
        item_tile=torch.from_numpy(item_tile),
        tile_items=torch.from_numpy(listed.reshape(-1)),
        chunks=tuple(chunks),
        places=_item_places(shape, tiles, rows, item_tile, key_tile, masked),
    )


def _item_places(
    shape: Shape, tiles: _RowTiles, rows: int, item_tile: Ints, key_tile: Ints, masked: Bools
) -> _ItemPlaces:
    row, _ = _rows_of(shape, tiles, rows)
    last = tiles.rows[item_tile, -1]
    return _ItemPlaces(
        table=tiles.table[item_tile, None],
        blocks=key_tile[:, None] * shape.tile_blocks + np.arange(shape.tile_blocks),
        last=last,
        masked_last=last[masked],
        masked_rows=tiles.rows[item_tile[masked]][:, row],
        key_positions=key_tile[masked, None] * shape.key_tile + np.arange(shape.key_tile),
    )


def _queries(shape: Shape, tiles: _RowTiles, rows: int, item_tile: Ints) -> Ints:
    """Return each item's queries as indices into [N * Q], [items * H * M]."""
    row, query = _rows_of(shape, tiles, rows)
    first = tiles.rows[item_tile][:, row] * shape.query_heads + query
    head = np.arange(shape.kv_heads) * shape.queries_per_head
    return np.ascontiguousarray((first[:, None, :] + head[:, None]).reshape(-1))


def _rows_of(shape: Shape, tiles: _RowTiles, rows: int) -> tuple[Ints, Ints]:
    """Return the row in its tile, and the query of the head, of each of the M padded rows."""
    count = tiles.rows.shape[1] * shape.queries_per_head
    inside = np.minimum(np.arange(rows), count - 1)
    row, query = np.divmod(inside, shape.queries_per_head)
    return row, query
