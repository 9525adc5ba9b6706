"""Which row counts of attention's matrix products give a row the same bits: found out, not assumed.

A matrix library picks kernels by shape, and an edge kernel may sum in another order. Attention pads
its row counts to multiples of an alignment; `find_alignment` tries alignments on this machine, with
one thread and with this process's number of them (the runner uses both), and takes the smallest
under which no row's bits depend on how many rows there are, where in the tile it is, or how many
tiles are multiplied at once. `model/products.py` does the same for the model's products.

Measured with torch 2.13 and MKL on AVX-512, two threads, float32, key tile 256, head_dim 64 to 128:
every multiple of 4 is safe; 1, 2 and 3 rows differ from more rows, and 6 from 12 when it is alone.
"""

from __future__ import annotations

from itertools import product

import torch

ALIGNMENTS = (4, 8, 16, 32)
_BATCHES = (1, 2, 3, 7, 24)


def padded_rows(rows: int, alignment: int) -> int:
    """Return the multiple of `alignment` that holds `rows`."""
    return -(-rows // alignment) * alignment


def find_alignment(rows: tuple[int, ...], head_dim: int, key_tile: int) -> int | None:
    """Return the smallest alignment under which all these row counts agree; None when none does."""
    for alignment in ALIGNMENTS:
        counts = sorted({padded_rows(count, alignment) for count in rows})
        if _agree(counts, head_dim, key_tile):
            return alignment
    return None


def _agree(counts: list[int], head_dim: int, key_tile: int) -> bool:
    """Compare every count and batch size with one product that holds all rows at once."""
    generator = torch.Generator().manual_seed(1)
    total = counts[-1] * 2
    q = torch.randn(total, head_dim, generator=generator)
    k = torch.randn(key_tile, head_dim, generator=generator)
    v = torch.randn(key_tile, head_dim, generator=generator)
    p = torch.softmax(torch.randn(total, key_tile, generator=generator), -1)
    scores = _in_tiles(q, k.t(), counts[-1], 2)
    outputs = _in_tiles(p, v, counts[-1], 2)
    threads = torch.get_num_threads()
    try:
        for used, count, batch in product((1, threads), counts, _BATCHES):
            torch.set_num_threads(used)
            rows = min(batch, total // count) * count
            if not torch.equal(_in_tiles(q[:rows], k.t(), count, batch), scores[:rows]):
                return False
            if not torch.equal(_in_tiles(p[-rows:], v, count, batch), outputs[-rows:]):
                return False
    finally:
        torch.set_num_threads(threads)
    return True


def _in_tiles(rows: torch.Tensor, right: torch.Tensor, count: int, batch: int) -> torch.Tensor:
    """Multiply tiles of `count` rows, `batch` at once; tiles repeat when there are fewer."""
    tiles = rows.reshape(-1, count, rows.shape[1])
    real = tiles.shape[0]
    repeats = -(-batch // real)
    tiles = tiles.repeat(repeats, 1, 1)[: max(batch, real)]
    # As attention has it: each tile with its own copy of the keys, transposed or not.
    copies = right.t().expand(tiles.shape[0], -1, -1).contiguous().transpose(1, 2)
    if right.is_contiguous():
        copies = copies.contiguous()
    return torch.bmm(tiles, copies)[:real].reshape(rows.shape[0], -1)
