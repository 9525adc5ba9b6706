"""Attention over one chunk of items, and the ordered sum of a group's chunks.

Views of scratch memory are made once a frame and used by every layer of its steps: an operation
costs some microseconds whatever its size, and there are tens of them a layer.

What a row does not see changes no bit of it, whatever is stored there: its score is replaced, and a
V that is not finite is made 0, so that a weight of 0 takes it away. Rows that do see it get NaN.

It refuses to know how a step was cut (`torch_plan`) and where a layer's records are: it is handed
the records' view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvass.common.block import BlockLayout
from kvass.common.kernels.formats import LARGEST_CODE, decode_into
from kvass.common.kernels.torch_plan import MASKED, Chunk, Contents, Group, Shape
from kvass.common.kernels.torch_records import Scratch, split_records


class ChunkWork:
    """One chunk's scratch views and what computes it. Mutable: the scratch memory only."""

    def __init__(
        self, layout: BlockLayout, shape: Shape, group: Group, chunk: Chunk, scratch: Scratch
    ) -> None:
        items, heads, tile = chunk.count, shape.kv_heads, shape.key_tile
        batch, first = items * heads, items - chunk.masked
        self._chunk = chunk
        words = (items * shape.tile_blocks, layout.head_groups, layout.layer_size // 8)
        self._raw = scratch.take("raw", words, torch.int64)
        self._codes, self._stored_scales = split_records(self._raw, layout, items)
        self._decoded = scratch.take("decoded", tuple(self._codes.shape))
        self._halves = scratch.take("halves", tuple(self._codes.shape), torch.int16)
        self._scales: torch.Tensor | None = None
        # What is ANDed with 0 where nothing is stored: the bits of scales, or of values without
        # them.
        bits = self._decoded
        if self._stored_scales is not None:
            bits = self._scales = scratch.take("scales", tuple(self._stored_scales.shape))
        self._unsafe = bits.view(torch.int32).view(2, items, heads, tile, -1)[:, first:]
        keys, self._values = self._decoded.view(2, batch, tile, shape.head_dim)
        self._keys = keys.transpose(1, 2)
        self._broken = scratch.take("broken", (batch, tile), torch.bool)
        self._queries = scratch.take("queries", (batch * group.rows, shape.head_dim))
        self._tiles = self._queries.view(batch, group.rows, -1)
        self._scores = scratch.take("scores", (batch, group.rows, tile))
        self._hidden = self._scores.view(items, heads, group.rows, tile)[first:]
        self._chances = scratch.take("chances", (batch, group.rows, tile))
        part = slice(chunk.start, chunk.start + items)
        size = (group.items, heads, group.rows)
        outputs = scratch.take("outputs", (*size, shape.head_dim))[part]
        self._outputs = outputs.view(batch, group.rows, -1)
        self._tops = scratch.take("tops", size)[part].view(batch, group.rows)
        self._peaks = scratch.take("peaks", size)[part].view(batch, group.rows)

    def run(self, whole: torch.Tensor, queries: torch.Tensor, contents: Contents) -> None:
        """Attend to one key tile an item: a softmax within the tile; `GroupWork` joins tiles."""
        self._decode(whole, contents)
        torch.index_select(queries, 0, self._chunk.queries, out=self._queries)
        torch.bmm(self._tiles, self._keys, out=self._scores)
        if bool(self._broken.any()):
            self._values.masked_fill_(self._broken.unsqueeze(-1), 0.0)
            self._scores.masked_fill_(self._broken.unsqueeze(1), torch.nan)
        if self._chunk.masked:
            self._hidden.masked_fill_(contents.hidden, MASKED)
        torch.amax(self._scores, -1, out=self._tops)
        torch.softmax(self._scores, -1, out=self._chances)
        torch.amax(self._chances, -1, out=self._peaks)
        torch.bmm(self._chances, self._values, out=self._outputs)

    def _decode(self, whole: torch.Tensor, contents: Contents) -> None:
        """Gather records and decode them, with 0 for what is not stored (a slot's garbage). Find
        the positions whose V is not finite."""
        torch.index_select(whole, 0, contents.slots, out=self._raw)
        if self._scales is None or self._stored_scales is None:
            self._decoded.copy_(self._codes)
            self._unsafe.bitwise_and_(contents.keep)
            sizes = torch.linalg.vector_norm(self._values, torch.inf, -1)
            torch.logical_not(sizes.isfinite(), out=self._broken)
            return
        self._scales.copy_(self._stored_scales)
        self._unsafe.bitwise_and_(contents.keep)
        largest = self._scales[1].view(self._broken.shape) * LARGEST_CODE
        torch.logical_not(largest.isfinite(), out=self._broken)
        decode_into(self._decoded, self._codes, self._scales, self._halves)


class GroupWork:
    """A group's chunks and the sum of their results. Mutable: the scratch memory only."""

    def __init__(self, layout: BlockLayout, shape: Shape, group: Group, scratch: Scratch) -> None:
        self._group = group
        self._chunks = [ChunkWork(layout, shape, group, chunk, scratch) for chunk in group.chunks]
        size = (group.items, shape.kv_heads * group.rows)
        self._outputs = scratch.take("outputs", (*size, shape.head_dim))
        self._tops = scratch.take("tops", size)
        self._peaks = scratch.take("peaks", size)
        # Results of all groups are joined later, so these are not scratch.
        self._total = torch.empty(group.tiles, size[1])
        self._merged = torch.empty(group.tiles, size[1], shape.head_dim)

    def run(
        self, whole: torch.Tensor, queries: torch.Tensor, contents: Sequence[Contents]
    ) -> torch.Tensor:
        """Return outputs [tiles * H * M, D]; the memory is used again by the next layer."""
        for chunk, content in zip(self._chunks, contents, strict=True):
            chunk.run(whole, queries, content)
        self._merge()
        return self._merged.view(-1, self._merged.shape[-1])

    def _merge(self) -> None:
        """Sum each row tile's items in the order of their key tiles, by weights that sum to 1.

        A tile's largest weight is 1 / the sum of its exponentials. `index_add_` adds along its
        index one after the other; a test checks that, bit for bit. Adding 0 last makes -0 into 0: a
        tile that weighs nothing would do the same, and whether there is one depends on a row's
        company.
        """
        group = self._group
        if group.depth == 1:
            # A lone weight is exactly 1. Items are not in their tiles' order: masked ones are last.
            torch.index_select(self._outputs, 0, group.tile_items, out=self._merged)
            self._merged.add_(0.0)
            return
        by_tile = self._tops.index_select(0, group.tile_items).view(group.tiles, group.depth, -1)
        top = by_tile.amax(1).index_select(0, group.item_tile)
        weights = torch.sub(self._tops, top, out=top).exp_().div_(self._peaks)
        self._total.zero_().index_add_(0, group.item_tile, weights)
        weights.div_(self._total.index_select(0, group.item_tile))
        self._outputs.mul_(weights.unsqueeze(-1))
        self._merged.zero_().index_add_(0, group.item_tile, self._outputs)
        self._merged.add_(0.0)
