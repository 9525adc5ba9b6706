"""The reference implementation of the kernels seam, in torch operations on a CPU.

Append and attend are some tens of operations a layer, whatever the number of requests and blocks;
loops run over chunks of bounded size only. Products are float32 over exactly decoded codes.

*A row's bits depend on its query, its position and the stored keys before it only*: key tiles are
at absolute positions, a row's partial results are summed in the order of its key tiles, and
products use row counts that were shown to give a row the same bits (`torch_row_counts`);
`deterministic` and `reason` say what was found. One thread at a time may use an instance: it owns
its scratch memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvass.common.block import SCALE_BYTES, BlockLayout
from kvass.common.errors import Invalid
from kvass.common.kernels.formats import encode
from kvass.common.kernels.numerics import ROTATED
from kvass.common.kernels.rotation import hadamard, multiply_rows
from kvass.common.kernels.torch_attention import GroupWork
from kvass.common.kernels.torch_plan import (
    KEY_TILE,
    ROW_TILES,
    Contents,
    Frame,
    Shape,
    contents,
    make_frame,
)
from kvass.common.kernels.torch_records import Scratch, records_of
from kvass.common.kernels.torch_row_counts import ALIGNMENTS, find_alignment
from kvass.common.kernels.turn import Turn, turned
from kvass.common.pool.memory import SlotMemory


@dataclass(frozen=True, slots=True)
class Step:
    """One step's plan: its frame, the frame's groups with their scratch views, and what these read
    in this step."""

    frame: Frame
    groups: tuple[GroupWork, ...]
    contents: tuple[list[Contents], ...]


class TorchPagedKv:
    """A paged pool's memory with the kernels that read and write it (`kernels.seam.PagedKv`).

    Mutable fields: the pool's memory, which the caller owns, `_scratch`, and `_last`, the last
    step, whose frame may fit the next one.
    """

    def __init__(
        self,
        memory: SlotMemory,
        layout: BlockLayout,
        query_heads: int,
        key_offsets: torch.Tensor | None = None,
        key_carry: torch.Tensor | None = None,
    ) -> None:
        """`key_offsets` float32 [layers, H, D] are taken off K, turned, before it is rotated, and
        its numbers are rounded in turn by `key_carry` [layers, H, D, D] (`kernels.formats`)."""
        assert layout.has_scales or (key_offsets is None and key_carry is None), layout
        if query_heads % layout.kv_heads:
            raise Invalid(
                f"{query_heads} query heads are no multiple of {layout.kv_heads} KV heads"
            )
        if layout.has_scales and layout.codes_size % SCALE_BYTES:
            raise Invalid(f"an odd number of codes in a record misaligns its scales: {layout}")
        key_tile = layout.block_tokens * max(1, round(KEY_TILE / layout.block_tokens))
        per_head = query_heads // layout.kv_heads
        alignment = find_alignment(
            tuple(per_head * rows for rows in ROW_TILES), layout.head_dim, key_tile
        )
        self.bits = "torch"  # what torch makes of them: `model/device_kind.py` looks
        self.deterministic = alignment is not None
        self.reason = (
            f"attention rows in multiples of {alignment}"
            if alignment
            else f"attention: no multiple of rows among {ALIGNMENTS} gives a row the same bits"
        )
        self.shape = Shape(
            query_heads=query_heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_tokens=layout.block_tokens,
            key_tile=key_tile,
            row_alignment=alignment or ALIGNMENTS[0],
        )
        self._layout = layout
        self._key_offsets, self._key_carry = key_offsets, key_carry
        self._records = [records_of(memory.tensor, layout, layer) for layer in range(layout.layers)]
        self._scratch = Scratch()
        self._last: Step | None = None
        rotation, rotated = hadamard(layout.head_dim), ROTATED[layout.kv_dtype]
        self._rotate_k = rotation if "k" in rotated else None
        self._rotate_v = rotation if "v" in rotated else None
        self._query_factor = 1 / math.sqrt(layout.head_dim)
        self._rotate_q = rotation * self._query_factor

    def plan(
        self, tables: torch.Tensor, row_table: torch.Tensor, row_position: torch.Tensor
    ) -> Step:
        """Prepare one step, once for all layers; arguments as in the seam."""
        table, position = row_table.numpy(), row_position.numpy()
        last = self._last
        if last is not None and last.frame.fits(self.shape, table, position):
            frame, groups = last.frame, last.groups
        else:
            frame = make_frame(self.shape, table, position)
            groups = tuple(
                GroupWork(self._layout, self.shape, group, self._scratch) for group in frame.groups
            )
        read = [contents(self.shape, group, tables.numpy(), position) for group in frame.groups]
        self._last = Step(frame, groups, tuple(read))
        return self._last

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
        layout, records = self._layout, self._records[layer]
        k = turned(k, turn)
        if self._key_offsets is not None:
            k = k - self._key_offsets[layer]
        k, v = _rotated(k, self._rotate_k), _rotated(v.float(), self._rotate_v)
        carry = None if self._key_carry is None else self._key_carry[layer]
        coded = (encode(k, layout.kv_dtype, carry), encode(v, layout.kv_dtype))
        split = (-1, layout.head_groups, layout.group_heads)
        for value, (codes, scales) in enumerate(coded):
            words = codes.view(records.word).view(*split, records.codes.shape[-1])
            records.codes[:, :, :, value].index_put_((slots, offsets), words)
            if scales is not None:
                assert records.scales is not None
                parts = scales.view(*split, layout.scale_parts)
                records.scales[:, :, :, value].index_put_((slots, offsets), parts)

    def attend(
        self, layer: int, q: torch.Tensor, plan: Step, turn: Turn | None = None
    ) -> torch.Tensor:
        """Return attention outputs float32 [N, Q, D] for queries [N, Q, D]."""
        assert q.shape[0] == plan.frame.row_count, (q.shape, plan.frame.row_count)
        q = turned(q, turn)
        if not plan.groups:
            return torch.empty_like(q)
        queries = self._prepare(q)
        whole = self._records[layer].whole
        outputs = [
            group.run(whole, queries, read)
            for group, read in zip(plan.groups, plan.contents, strict=True)
        ]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return _rotated(joined.index_select(0, plan.frame.place).view(q.shape), self._rotate_v)

    def _prepare(self, q: torch.Tensor) -> torch.Tensor:
        """Return scaled queries [N * Q, D], rotated as the stored K is."""
        if self._rotate_k is None:
            return q.reshape(-1, q.shape[-1]) * self._query_factor
        return multiply_rows(q, self._rotate_q).view(-1, q.shape[-1])


def _rotated(rows: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
    return rows if rotation is None else multiply_rows(rows, rotation)
