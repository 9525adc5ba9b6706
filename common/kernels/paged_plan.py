"""How one step's attention is cut into pieces: row tiles, key tiles, groups and chunks. Pure.

    row tile   up to 128 rows of one table, padded to one of `ROW_TILES` sizes by repeating its last
    key tile   a fixed run of `key_tile` positions, at absolute multiples of it
    item       a (row tile, key tile) pair with something to attend to: the unit of work
    chunk      items that are computed at once; bounds the memory of scores and of decoded keys
    group      whole row tiles of one size with all their items; bounds the memory of its results

An item's result depends on its queries, positions and stored keys only, and a row's items are
summed in the order of their key tiles; so how items are grouped changes no bit of any row. It knows
nothing of layers and values: a plan serves every layer of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.kernels.row_counts import padded_rows

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

    The last `masked` items reach beyond some row's context. `bias` float32 [masked, 1, M, T] hides
    what lies beyond each row's own position; `stored` bool [masked, T] is false beyond the row
    tile's last position, where slots hold garbage.
    """

    start: int
    count: int
    masked: int
    slots: torch.Tensor
    queries: torch.Tensor
    bias: torch.Tensor
    stored: torch.Tensor


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


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """One step's attention. `place` int64 [N * Q] finds each query's output among the groups'."""

    row_count: int
    groups: tuple[Group, ...]
    place: torch.Tensor


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


@dataclass(frozen=True, slots=True)
class _Items:
    """A chunk's items, the `masked` ones last."""

    tile: Ints
    key_tile: Ints
    masked: int


def make_plan(shape: Shape, tables: Ints, row_table: Ints, row_position: Ints) -> PagedPlan:
    """Cut a step into groups and chunks; arguments as in the kernels seam's `plan`."""
    assert row_table.shape == row_position.shape and tables.ndim == 2
    groups: list[Group] = []
    place = np.zeros((len(row_table), shape.query_heads), dtype=np.int64)
    base = 0
    for tiles in _row_tiles(row_table, row_position):
        rows = padded_rows(tiles.rows.shape[1] * shape.queries_per_head, shape.row_alignment)
        for first, stop in _group_bounds(tiles, shape, rows):
            part = tiles.cut(first, stop)
            groups.append(_group(shape, tables, part, rows))
            _find_places(place, shape, part, rows, base)
            base += len(part.table) * shape.kv_heads * rows
    return PagedPlan(len(row_table), tuple(groups), torch.from_numpy(place.reshape(-1)))


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


def _group(shape: Shape, tables: Ints, tiles: _RowTiles, rows: int) -> Group:
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
        items = _Items(item_tile[part], key_tile[part], int(masked[part].sum()))
        chunks.append(_chunk(shape, tables, tiles, rows, start, items))
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
    )


def _chunk(
    shape: Shape, tables: Ints, tiles: _RowTiles, rows: int, start: int, items: _Items
) -> Chunk:
    bias, stored = _masks(shape, tiles, rows, items)
    return Chunk(
        start=start,
        count=len(items.tile),
        masked=items.masked,
        slots=torch.from_numpy(_slots(shape, tables, tiles, items)),
        queries=torch.from_numpy(_queries(shape, tiles, rows, items)),
        bias=bias,
        stored=stored,
    )


def _slots(shape: Shape, tables: Ints, tiles: _RowTiles, items: _Items) -> Ints:
    """Return each item's slots, [items * tile_blocks]; past the context, its last slot again."""
    last = tiles.positions[items.tile, -1] // shape.block_tokens
    block = items.key_tile[:, None] * shape.tile_blocks + np.arange(shape.tile_blocks)
    block = np.minimum(block, last[:, None])
    return np.ascontiguousarray(tables[tiles.table[items.tile][:, None], block].reshape(-1))


def _queries(shape: Shape, tiles: _RowTiles, rows: int, items: _Items) -> Ints:
    """Return each item's queries as indices into [N * Q], [items * H * M]."""
    row, query = _rows_of(shape, tiles, rows)
    first = tiles.rows[items.tile][:, row] * shape.query_heads + query
    head = np.arange(shape.kv_heads) * shape.queries_per_head
    return np.ascontiguousarray((first[:, None, :] + head[:, None]).reshape(-1))


def _rows_of(shape: Shape, tiles: _RowTiles, rows: int) -> tuple[Ints, Ints]:
    """Return the row in its tile, and the query of the head, of each of the M padded rows."""
    count = tiles.rows.shape[1] * shape.queries_per_head
    inside = np.minimum(np.arange(rows), count - 1)
    row, query = np.divmod(inside, shape.queries_per_head)
    return row, query


def _masks(
    shape: Shape, tiles: _RowTiles, rows: int, items: _Items
) -> tuple[torch.Tensor, torch.Tensor]:
    first = len(items.tile) - items.masked
    tile, key_tile = items.tile[first:], items.key_tile[first:]
    position = key_tile[:, None] * shape.key_tile + np.arange(shape.key_tile)
    row, _ = _rows_of(shape, tiles, rows)
    own = tiles.positions[tile][:, row]
    bias = np.where(position[:, None, :] > own[:, :, None], np.float32(MASKED), np.float32(0))
    stored = position <= tiles.positions[tile, -1][:, None]
    return torch.from_numpy(bias[:, None]), torch.from_numpy(stored)
