"""The fixed rotation of stored heads: an orthonormal Hadamard matrix over head_dim. Pure.

It is block-diagonal with the largest power of two that divides head_dim (80 = 5x16, 96 = 3x32),
spreads outlier channels over their block, and leaves q·k as it is when both are rotated. The matrix
is symmetric and its own inverse, so undoing a rotation is rotating again.
"""

from __future__ import annotations

import math

import torch

# Rows are multiplied in tiles of exactly this many, so that a row's bits don't depend on how many
# rows there are: a matrix product may change its order of summation with its row count.
ROW_TILE = 64


def hadamard(head_dim: int) -> torch.Tensor:
    """Return the rotation for a head_dim, float32 [head_dim, head_dim]."""
    width = head_dim & -head_dim
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < width:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    blocks = torch.eye(head_dim // width, dtype=torch.float64)
    return (torch.kron(blocks, block) / math.sqrt(width)).to(torch.float32)


def multiply_rows(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return float32 rows [..., D] times a matrix [D, D]; a row's bits don't depend on others."""
    flat = rows.reshape(-1, rows.shape[-1])
    count = flat.shape[0]
    if not count:
        return rows  # a full hit writes no row at all
    tiles = -(-count // ROW_TILE)
    if count % ROW_TILE:
        flat = torch.nn.functional.pad(flat, (0, 0, 0, tiles * ROW_TILE - count))
    tiled = flat.view(tiles, ROW_TILE, -1)
    product = torch.bmm(tiled, matrix.expand(tiles, -1, -1))
    return product.view(tiles * ROW_TILE, -1)[:count].view(rows.shape)
