"""Rotary position embedding: frequencies of every kind of scaling, and the angles of a batch. Owns no state.

Shapes: T tokens, D head dimension. The rotation itself is `tenuto_kernels.ops.rope_store`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tenuto_server.model.config import ModelConfig, RopeScaling


def rope_frequencies(config: ModelConfig, factors: Tensor | None = None) -> tuple[Tensor, float]:
    """Angular frequency per rotated pair [D/2] in radians per token, and the factor on cos and sin.

    Base: theta^(-2i/D) (Su et al. 2021). ``linear``: all divided by the factor. ``llama3``: wavelengths longer than
    original/low are divided by the factor, shorter than original/high kept, interpolated between (Meta, Llama 3.1).
    ``yarn``: a ramp between kept and divided, by rotations over the original context, and attention scaled by
    0.1 ln(factor) + 1 (Peng et al. 2023). ``factors``: divided by the given divisors [D/2].
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies, 1.0
    if scaling.kind == "factors":
        assert factors is not None, "the weights carry the factors"
        return frequencies / factors.float(), 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    attention = scaling.attention_factor
    if attention is None:
        attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return _yarn(frequencies, scaling, config), attention


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelength
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(frequencies: Tensor, scaling: RopeScaling, config: ModelConfig) -> Tensor:
    def pair_with(rotations: float) -> float:
        """Index of the pair that turns this often over the original context."""
        context = scaling.original_max_position
        return config.head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(config.head_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [T, D/2], for int64 positions [T]."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor
