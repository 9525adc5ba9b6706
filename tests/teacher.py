"""Teacher-forced comparison with `transformers`: texts, our logits through a pool, agreement."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

from kvass.common.block import BlockLayout
from kvass.common.kernels.paged import paged_kv
from kvass.common.model.load import Model
from kvass.common.model.tokenizer import Tokenizer
from kvass.common.pool.memory import SlotMemory

BLOCK_TOKENS = 16
TEXT_TOKENS = 512


def texts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the first 512 tokens of the longest texts of Python's own documentation."""
    longest = sorted(topics.values(), key=len, reverse=True)[:count]
    found = [tokenizer.encode(text)[:TEXT_TOKENS] for text in longest]
    assert len(found) == count and all(len(ids) == TEXT_TOKENS for ids in found)
    return found


def logits_of(model: Model, ids: list[int]) -> torch.Tensor:
    """Return our logits [512, vocab] of every position, K and V through a paged bf16 pool."""
    spec = model.spec
    layout = BlockLayout(spec.layers, spec.kv_heads, spec.head_dim, BLOCK_TOKENS, "bf16")
    rows = torch.arange(len(ids))
    blocks = -(-len(ids) // BLOCK_TOKENS)
    kv = paged_kv(SlotMemory(layout, blocks), layout, spec.heads)
    plan = kv.plan(torch.arange(blocks)[None], torch.zeros_like(rows), rows)
    logits = model.forward(
        *(torch.tensor(ids), rows, kv, plan, None),
        *(rows // BLOCK_TOKENS, rows % BLOCK_TOKENS, rows),
    )
    assert logits is not None
    return logits


@dataclass(frozen=True)
class Disagreement:
    """A position where the best tokens differ, and by how much the reference prefers its own."""

    text: int
    position: int
    ours: int
    theirs: int
    margin: float


def disagreements(text: int, ours: torch.Tensor, reference: torch.Tensor) -> list[Disagreement]:
    """Compare the best token of every row; `margin` is in the reference's log-probability."""
    best, choice = reference.argmax(-1), ours.argmax(-1)
    found = []
    for position in (best != choice).nonzero()[:, 0].tolist():
        theirs, mine = int(best[position]), int(choice[position])
        margin = float(reference[position, theirs] - reference[position, mine])
        found.append(Disagreement(text, position, mine, theirs, margin))
    return found
