"""A model of a few hashes that notices every wrong byte, in whatever block and position.

A token's KV is a hash of the token and of the KV of *all* tokens before it, each at its position,
as attention sums over all of them; it fills the token's whole share of the slot. So a row that
reads one wrong bit, a late byte, a block of another prefix or the right block in the wrong place
gives another KV and another next token, and so do all rows after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from kvass.common.model.runner import Rows
from store_sim import LAYOUT, SlotArray

VOCABULARY = 16
BLOCK = LAYOUT.block_tokens
WORDS = LAYOUT.block_size // BLOCK // 8  # 64-bit words of a token's KV
LENGTH_MAX = 1100  # tokens of the longest request in any simulation
_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd: whatever bit of a state is wrong, its product's top bits are
# Odd weights: a wrong bit changes the sum, and so do two blocks that changed places.
_WEIGHTS: NDArray[np.uint64] = np.arange(1, 2 * LENGTH_MAX, 2, dtype=np.uint64)


def kv_of(state: int, token: int) -> int:
    """The KV of a token after everything that `state` stands for."""
    text = state.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def after(state: int, position: int, kv: int) -> int:
    """The state with one more token's KV."""
    return (state + (2 * position + 1) * WORDS * kv) & _MASK


def next_of(state: int) -> int:
    return (state * _SPREAD & _MASK) >> 60


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What the model answers when nothing is cached, lost or shared."""
    state = 0
    for position, token in enumerate(prompt):
        state = after(state, position, kv_of(state, token))
    answer: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        answer.append(next_of(state))
        state = after(state, position, kv_of(state, answer[-1]))
    return answer


class HashModel:
    """A `Runner` whose forward pass is `kv_of`. Mutable field: `rows` computed so far."""

    def __init__(self, memory: SlotArray) -> None:
        self._cells = memory.array.view(np.uint64).reshape(len(memory.array), BLOCK, WORDS)
        self.rows = 0

    def run(self, pieces: Sequence[Rows]) -> torch.Tensor | None:
        states = [self._run(piece) for piece in pieces]
        self.rows += sum(len(piece.tokens) for piece in pieces)
        wanted = [state for state, piece in zip(states, pieces, strict=True) if piece.logits]
        if not wanted:
            return None
        logits = torch.zeros(len(wanted), VOCABULARY)
        for row, state in enumerate(wanted):
            logits[row, next_of(state)] = 1.0
        return logits

    def _run(self, piece: Rows) -> int:
        if not piece.write:
            return self._read(piece, piece.start + len(piece.tokens))
        state = self._read(piece, piece.start)
        for position, token in enumerate(piece.tokens, piece.start):
            kv = kv_of(state, token)
            self._cells[piece.slots[position // BLOCK], position % BLOCK] = kv
            state = after(state, position, kv)
        return state

    def _read(self, piece: Rows, stop: int) -> int:
        """Attend to every position before `stop`."""
        slots = list(piece.slots[: -(-stop // BLOCK)])
        sums = self._cells[slots].sum(axis=2).reshape(-1)[:stop]
        return int((sums * _WEIGHTS[:stop]).sum())
