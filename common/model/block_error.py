"""How far two slots' KV is apart: what rounding can explain, and what it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch

from kvass.common.block import BlockLayout
from kvass.common.model.known_answer import read_back
from kvass.common.pool.memory import SlotMemory

# Largest relative L2 error of one token's K or V in one head. Workers of one namespace compute the
# same bits where they are deterministic: 0. Elsewhere a code may round the other way, half a step
# or 6 % of a value in fp8; one flipped bit of a large code moves a row by a third and more.
ERROR_MAX = 0.3


def block_error(memory: SlotMemory, layout: BlockLayout, one: int, other: int) -> float:
    """Return the largest relative error of a row (token, head) of `other`'s K and V beside `one`'s;
    infinite where there is no number."""
    most = 0.0
    if torch.equal(memory.tensor[one], memory.tensor[other]):
        return most
    for layer in range(layout.layers):
        for value in (False, True):
            ours, theirs = (
                read_back(memory, layout, [slot], layer, value) for slot in (one, other)
            )
            apart = (theirs - ours).norm(dim=-1) / ours.norm(dim=-1).clamp_min(1e-6)
            most = max(most, float(apart.nan_to_num(nan=float("inf")).max()))
    return most


def digest(memory: SlotMemory, slots: Sequence[int]) -> bytes:
    """Name the bytes of slots."""
    return blake2b(memory.tensor[list(slots)].numpy().tobytes()).digest()
