"""Would zstd pay on flash? Real KV of the default model, block by block, in each format.

    plain     the block as it is
    grouped   bytes of like significance together: codes apart from scales, high bytes before low
    high      as grouped, and only what compresses: of bf16 the high bytes, of the others the codes

    python benchmarks/flash.py --compression

Speeds are of one thread, of a block's own bytes. It pays where what is saved of the disk's time is
more than what it takes of the processor's.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.block import BlockLayout, KvDtype
from kvass.common.config import DEFAULT_MODEL
from kvass.common.kernels.paged import paged_kv
from kvass.common.model.fetch import resolve_model
from kvass.common.model.load import Model, load_model
from kvass.common.model.spec import load_spec
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.memory import SlotMemory
from rig import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from teacher import BLOCK_TOKENS, TEXT_TOKENS, texts

FORMATS: tuple[KvDtype, ...] = ("bf16", "fp8", "int8", "int4")
LEVEL = 1  # higher ones gain a percent and take several times as long
TEXTS, QUICK_TEXTS = 8, 2
Bytes = NDArray[np.uint8]


def blocks_of(model: Model, layout: BlockLayout, ids: list[int]) -> Bytes:
    """Return the full blocks [blocks, bytes] of a text, as a prefill worker stores them."""
    rows = torch.arange(len(ids))
    count = len(ids) // BLOCK_TOKENS
    memory = SlotMemory(layout, count)
    kv = paged_kv(memory, layout, model.spec.heads)
    plan = kv.plan(torch.arange(count)[None], torch.zeros_like(rows), rows)
    places = (rows // BLOCK_TOKENS, rows % BLOCK_TOKENS)
    with torch.inference_mode():
        model.forward(torch.tensor(ids), rows, kv, plan, None, *places, rows[-1:])
    return np.array(memory.array[:count])


def plain(block: Bytes, layout: BlockLayout) -> tuple[Bytes, Bytes]:
    """Return what is compressed, and what is left as it is."""
    return block, block[:0]


def grouped(block: Bytes, layout: BlockLayout) -> tuple[Bytes, Bytes]:
    high, low = planes(block, layout)
    return np.concatenate([high, low]), block[:0]


def planes(block: Bytes, layout: BlockLayout) -> tuple[Bytes, Bytes]:
    """Return a block's codes (of bf16 their high bytes), then all else."""
    records = block.reshape(-1, layout.record_size)
    codes = records[:, : layout.codes_size].reshape(-1)
    rest = records[:, layout.codes_size :].reshape(-1)
    rest = np.concatenate([rest[1::2], rest[0::2]])  # of scales, too, the high bytes first
    if layout.kv_dtype != "bf16":
        return codes.copy(), rest
    return codes[1::2].copy(), np.concatenate([codes[0::2], rest])


WAYS = {"plain": plain, "grouped": grouped, "high": planes}


def figures(quick: bool) -> list[Figure]:
    """Return the table; needs zstandard."""
    import zstandard

    folder = resolve_model(DEFAULT_MODEL, progress=True)
    spec, tokenizer = load_spec(folder), Tokenizer.load(folder)
    model = load_model(folder, spec)
    found = texts(tokenizer, QUICK_TEXTS if quick else TEXTS)
    made: list[Figure] = []
    for name in FORMATS:
        layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_TOKENS, name)
        blocks = np.concatenate([blocks_of(model, layout, ids) for ids in found])
        assert len(blocks) == len(found) * (TEXT_TOKENS // BLOCK_TOKENS)
        for way, split in WAYS.items():
            packer, opener = zstandard.ZstdCompressor(level=LEVEL), zstandard.ZstdDecompressor()
            size = 0
            pack_s = open_s = 0.0
            for block in blocks:
                started_s = time.perf_counter()
                wanted, left = split(block, layout)
                packed = packer.compress(wanted.data)
                packed_s = time.perf_counter()
                opened = opener.decompress(packed)
                open_s += time.perf_counter() - packed_s
                pack_s += packed_s - started_s
                size += len(packed) + len(left)
                assert opened == wanted.tobytes()
            made += [
                Figure(f"{name} {way}: smaller by", blocks.nbytes / size, "times"),
                Figure(f"{name} {way}: in", blocks.nbytes / pack_s / 1e9, "GB/s"),
                Figure(f"{name} {way}: out", blocks.nbytes / open_s / 1e9, "GB/s"),
            ]
    return made
