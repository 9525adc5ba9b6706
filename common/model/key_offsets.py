"""What is taken off K before it is stored: for each layer, KV head and channel one number.

Softmax sees no number that is added to all scores of a row, so K may be stored less any fixed
vector, and attention computes with what is stored; a soft-cap or a sink would see it. K's channels
stand far from zero, and what is near zero loses less to few bits.

The offsets are the mean of K, from a pass over a fixed prompt that spreads over the vocabulary: of
K before rope, then turned by the mean of the positions' turns. So what a position turns quickly
comes to nothing, as it does in long texts, and the prompt may be short. The first token is left
out: its K is like no other's. They are computed on one thread, so that workers of one kind of
device find the same bits; their digest enters the namespace (`identity.worker_fields`).
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import load_file

from kvass.common.kernels.turn import Turn, turned
from kvass.common.model.known_answer import computed_kv, keep, prompt
from kvass.common.model.rope import angles, inverse_frequencies
from kvass.common.model.spec import ModelSpec

# Measured with `benchmarks/quality.py`: four times as many tokens gain nothing, a quarter of them
# loses a sixth; the mean of 2,048 tokens of English, turned as they stand, is as good.
TOKENS = 256
POSITIONS = 2048


def key_offsets(model_dir: Path, spec: ModelSpec, file: Path) -> torch.Tensor:
    """Return the offsets float32 [layers, KV heads, head_dim], from `file` or computed now."""
    if file.is_file():
        return load_file(file)["offsets"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stored = computed_kv(model_dir, spec, prompt(spec, TOKENS))
        offsets = torch.stack([_offsets_of(spec, k) for k in stored[:, 0]])
    finally:
        torch.set_num_threads(threads)
    keep({"offsets": offsets}, file)
    return offsets


def _offsets_of(spec: ModelSpec, k: torch.Tensor) -> torch.Tensor:
    """Return one layer's offsets; K [tokens, H, D] stands turned at positions 0, 1, …"""
    frequencies = inverse_frequencies(spec)
    cosine, sine = angles(torch.arange(len(k)), frequencies)
    before = turned(k, Turn(cosine, -sine))[1:].mean(0, keepdim=True)
    cosine, sine = angles(torch.arange(POSITIONS), frequencies)
    return turned(before, Turn(cosine.mean(0, keepdim=True), sine.mean(0, keepdim=True)))[0]


def digest(offsets: torch.Tensor) -> str:
    """Name the offsets' bits."""
    return blake2b(offsets.contiguous().numpy().data, digest_size=32).hexdigest()
