"""What K is stored by, found once a model: what is taken off it, and how its numbers are rounded.

*Offsets*: for each layer, KV head and channel one number. Softmax sees no number that is added to
all scores of a row, so K may be stored less any fixed vector, and attention computes with what is
stored; a soft-cap or a sink would see it. K's channels stand far from zero, and what is near zero
loses less to few bits. They are the mean of K: of K before rope, then turned by the mean of the
positions' turns. So what a position turns quickly comes to nothing, as it does in long texts, and
the prompt may be short. The first token is left out: its K is like no other's.

*Carry*: for each layer and KV head a matrix. What rounding takes from a key is seen by queries
only, and these have few large directions: an error across them costs next to nothing. So a row's
numbers are rounded one after the other, and what one loses is made up for by those after it as well
as they can, by the queries' second moments: successive rounding as GPTQ does it to weights (Frantar
et al., 2022), with K's rows in their place. What is stored and how it is read stay as they are.

Both come from one pass over a fixed prompt that spreads over the vocabulary, on one thread, so that
workers of one kind of device find the same bits; their digest enters the namespace
(`identity.worker_fields`).
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from kvass.common.kernels.rotation import hadamard
from kvass.common.kernels.turn import Turn, turned
from kvass.common.model.known_answer import dense_pass, keep, prompt
from kvass.common.model.rope import angles, inverse_frequencies
from kvass.common.model.spec import ModelSpec

# Measured with `benchmarks/quality.py`: four times as many tokens gain nothing, a quarter of them
# loses a sixth; the mean of 2,048 tokens of English, turned as they stand, is as good.
TOKENS = 256
POSITIONS = 2048
# Added to the queries' moments, as a share of their mean: what a short prompt did not show. A tenth
# of it gives the same within the noise.
DAMPING = 0.1


class KeyTerms(NamedTuple):
    """`offsets` float32 [layers, KV heads, D]; `carry` float32 [layers, KV heads, D, D], of which
    row i says what number i's loss, times it, takes off the numbers after it; K is rotated then.
    """

    offsets: torch.Tensor
    carry: torch.Tensor

    def digest(self) -> str:
        """Name the terms' bits."""
        named = blake2b(digest_size=32)
        for part in self:
            named.update(part.contiguous().numpy().data)
        return named.hexdigest()


def key_terms(model_dir: Path, spec: ModelSpec, file: Path) -> KeyTerms:
    """Return a model's terms, from `file` or computed now."""
    if file.is_file():
        found = load_file(file)
        return KeyTerms(found["offsets"], found["carry"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seen = dense_pass(model_dir, spec, prompt(spec, TOKENS), with_queries=True)
        terms = KeyTerms(
            torch.stack([_offsets_of(spec, k) for k, _ in seen.stored]),
            torch.stack([_carry_of(spec, q) for q in seen.queries]),
        )
    finally:
        torch.set_num_threads(threads)
    keep(terms._asdict(), file)
    return terms


def _unturned(spec: ModelSpec, rows: torch.Tensor) -> torch.Tensor:
    """Return heads [tokens, H, D] as they were before rope, but for the first token's."""
    cosine, sine = angles(torch.arange(len(rows)), inverse_frequencies(spec))
    return turned(rows, Turn(cosine, -sine))[1:]


def _offsets_of(spec: ModelSpec, k: torch.Tensor) -> torch.Tensor:
    """Return one layer's offsets; K [tokens, H, D] stands turned at positions 0, 1, …"""
    before = _unturned(spec, k).mean(0, keepdim=True)
    cosine, sine = angles(torch.arange(POSITIONS), inverse_frequencies(spec))
    return turned(before, Turn(cosine.mean(0, keepdim=True), sine.mean(0, keepdim=True)))[0]


def _carry_of(spec: ModelSpec, q: torch.Tensor) -> torch.Tensor:
    """Return one layer's carry; queries [tokens, Q, D] stand turned at positions 0, 1, …"""
    before = _unturned(spec, q)
    positions = torch.arange(len(before)) * POSITIONS // len(before)
    spread = turned(before, angles(positions, inverse_frequencies(spec)))
    rows = (spread @ hadamard(spec.head_dim)).double()
    rows = rows.view(len(rows), spec.kv_heads, -1, spec.head_dim).transpose(0, 1).flatten(1, 2)
    moments = rows.transpose(1, 2) @ rows / rows.shape[1]
    level = moments.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    moments += DAMPING * level[:, None, None] * torch.eye(spec.head_dim)
    factor = torch.linalg.cholesky(torch.linalg.inv(moments), upper=True)
    carry = (factor / factor.diagonal(dim1=1, dim2=2)[..., None]).triu(1)
    # In bf16: what another order of sums changes is rounded away.
    rounded: torch.Tensor = carry.to(torch.bfloat16).float()
    return rounded
