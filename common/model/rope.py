"""Rotary position embedding: a position's angles, in float32. `kernels/turn.py` turns by them."""

from __future__ import annotations

import math

import torch

from kvass.common.kernels.turn import Turn
from kvass.common.model.spec import Llama3Rope, ModelSpec


def inverse_frequencies(spec: ModelSpec) -> torch.Tensor:
    """Return the angle per position of each pair of channels, float32 [D/2]."""
    exponents = (
        torch.arange(0, spec.head_dim, 2, dtype=torch.int64).to(torch.float32) / spec.head_dim
    )
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_scaling is None:
        return frequencies
    return _stretch(frequencies, spec.rope_scaling)


def _stretch(frequencies: torch.Tensor, rope: Llama3Rope) -> torch.Tensor:
    """Llama 3: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    length = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = length / rope.low_freq_factor, length / rope.high_freq_factor
    blend = (length / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, blended)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def angles(positions: torch.Tensor, frequencies: torch.Tensor) -> Turn:
    """Return the turn of rows at `positions` int64 [N]."""
    angle = positions.to(torch.float32)[:, None] * frequencies
    return Turn(angle.cos(), angle.sin())
