"""Pools for tests of compiled attention: random KV in random slots among NaNs, and references."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kvass.common.block import BlockLayout
from kvass.common.kernels.formats import CODE_DTYPES, decode
from kvass.common.kernels.native_paged import NativePagedKv
from kvass.common.pool.memory import SlotMemory

SPARE = 3  # slots that nobody owns


@dataclass
class NativePool:
    """Sequences stored in a pool whose other bytes are all NaNs. `generator` made all of it."""

    layout: BlockLayout
    memory: SlotMemory
    tables: torch.Tensor
    lengths: list[int]
    generator: torch.Generator

    @classmethod
    def of(
        cls, layout: BlockLayout, query_heads: int, lengths: list[int], generator: torch.Generator
    ) -> NativePool:
        blocks = -(-max(lengths) // layout.block_tokens)
        count = blocks * len(lengths)
        memory = SlotMemory(layout, count + SPARE)
        memory.array.fill(0xFF)
        order = torch.randperm(count + SPARE, generator=generator)
        pool = cls(layout, memory, order[:count].view(len(lengths), -1), lengths, generator)
        for sequence, length in enumerate(lengths):
            size = (length, layout.kv_heads, layout.head_dim)
            k, v = pool.random(*size), pool.random(*size)
            for layer in range(layout.layers):
                pool.append(pool.kernels(query_heads), layer, sequence, k, v, 0)
        return pool

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def kernels(self, query_heads: int, **options: float | str | None) -> NativePagedKv:
        return NativePagedKv(self.memory, self.layout, query_heads, **options)  # type: ignore[arg-type]

    def append(
        self,
        kv: NativePagedKv,
        layer: int,
        sequence: int,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
    ) -> None:
        positions = torch.arange(first, first + len(k))
        slots = self.tables[sequence][positions // self.layout.block_tokens]
        kv.append(layer, k, v, slots, positions % self.layout.block_tokens)

    def poison(self, sequence: int, positions: range, word: int, *, value: bool) -> None:
        """Overwrite layer 0's scales of K or V with a bf16, and its numbers with the same bytes."""
        layout = self.layout
        number = np.frombuffer(word.to_bytes(2, "little"), dtype=np.uint8)
        width = layout.head_dim * layout.code_bytes
        for position in positions:
            slot = self.memory.array[int(self.tables[sequence, position // layout.block_tokens])]
            token = position % layout.block_tokens
            for head in range(layout.kv_heads):
                at = layout.code_offset(head, 0, value, token)
                slot[at : at + width] = np.tile(number, width // 2)
                if layout.has_scales:
                    at = layout.scale_offset(head, 0, value, token)
                    slot[at : at + 2] = number

    def stored(self, sequence: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read K and V float64 [length, H, D] by `BlockLayout`'s offsets, rotated as they are."""
        layout, length = self.layout, self.lengths[sequence]
        positions = torch.arange(length)
        raw = self.memory.tensor[self.tables[sequence][positions // layout.block_tokens]]
        tokens = positions % layout.block_tokens
        found = []
        for value in (False, True):
            heads = []
            for head in range(layout.kv_heads):
                width = layout.head_dim * layout.code_bytes
                first = layout.code_offset(head, layer, value, 0)
                codes = raw.gather(1, (first + tokens * width)[:, None] + torch.arange(width))
                scales = None
                if layout.has_scales:
                    at = layout.scale_offset(head, layer, value, 0) + 2 * tokens
                    scales = raw.gather(1, at[:, None] + torch.arange(2)).view(torch.bfloat16)[:, 0]
                heads.append(decode(codes.view(CODE_DTYPES[layout.kv_dtype]), scales))
            found.append(torch.stack(heads, 1).double())
        return found[0], found[1]

    def attend(
        self,
        kv: NativePagedKv,
        rows: list[tuple[int, int]],
        queries: torch.Tensor,
        layer: int = 0,
    ) -> torch.Tensor:
        """Attend in one step for rows (sequence, position)."""
        sequences, positions = torch.tensor(rows).unbind(1)
        plan = kv.plan(self.tables, sequences.contiguous(), positions.contiguous())
        return kv.attend(layer, queries, plan)


def exact_hadamard(head_dim: int) -> torch.Tensor:
    """The rotation in float64, from its definition: (-1)**(bits that both indices have)."""
    width = head_dim & -head_dim
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
    block = torch.tensor(signs, dtype=torch.float64) / math.sqrt(width)
    return torch.kron(torch.eye(head_dim // width, dtype=torch.float64), block)


def rounded_queries(layout: BlockLayout, queries: torch.Tensor) -> torch.Tensor:
    """Return queries, float64, that the kernels with bf16 products would not have to round."""
    rotation = exact_hadamard(layout.head_dim)
    factor = math.log2(math.e) / math.sqrt(layout.head_dim)
    turned = queries.double()
    if layout.kv_dtype != "bf16":
        turned = turned @ rotation
    kept = (turned * factor).float().bfloat16().double() / factor
    return kept if layout.kv_dtype == "bf16" else kept @ rotation


def exact_attention(
    pool: NativePool,
    rows: list[tuple[int, int]],
    queries: torch.Tensor,
    layer: int,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention by definition, in float64, to what is stored."""
    layout = pool.layout
    rotation = exact_hadamard(layout.head_dim)
    stored = [pool.stored(sequence, layer) for sequence in range(len(pool.lengths))]
    share = queries.shape[1] // layout.kv_heads
    outputs = []
    for (sequence, position), q in zip(rows, queries.double(), strict=True):
        first = max(0, position - window + 1) if window else 0
        keys, values = (
            each[first : position + 1].repeat_interleave(share, 1) for each in stored[sequence]
        )
        turned = q if layout.kv_dtype == "bf16" else q @ rotation
        scores = torch.einsum("qd,tqd->qt", turned, keys) / math.sqrt(layout.head_dim)
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        out = torch.einsum("qt,tqd->qd", scores.softmax(-1), values)
        outputs.append(out @ rotation if layout.kv_dtype == "int8" else out)
    return torch.stack(outputs)
