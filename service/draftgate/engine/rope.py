"""Rotary position embedding tables.

Formulas: RoFormer (arXiv 2104.09864) section 3.4; linear scaling (arXiv 2306.15595); yarn
(arXiv 2309.00071) section 3; llama3 as in the Llama 3.1 release.
"""

from __future__ import annotations

import math

import torch

from draftgate.engine.config import RopeConfig

__all__ = ["RopeTable", "rotate_"]


class RopeTable:
    """cos and signed sin for every position.

    A head's vector x = [a, b] (two halves) becomes x * cos + [b, a] * signed_sin, where
    signed_sin is [-sin, sin].
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies, amplitude = _frequencies(config, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
        self.cos = torch.cat((cos, cos), dim=1).to(dtype).to(device)  # [positions, head_dim]
        self.signed_sin = torch.cat((-sin, sin), dim=1).to(dtype).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin for positions [tokens], each [tokens, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.signed_sin[positions].unsqueeze(1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate x [tokens, heads, head_dim] in place."""
    tokens, heads, head_dim = x.shape
    swapped = x.view(tokens, heads, 2, head_dim // 2).flip(2).view(tokens, heads, head_dim)
    x.mul_(cos).addcmul_(swapped, signed_sin)


def _frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angular frequencies [head_dim / 2] in radians per position, and the amplitude."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.scaling["factor"], 1.0
    if config.kind == "llama3":
        return _llama3(plain, config), 1.0
    if config.kind == "yarn":
        return _yarn(plain, config, head_dim)
    return plain, 1.0


def _llama3(plain: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between are blended."""
    factor = config.scaling["factor"]
    low = config.scaling["low_freq_factor"]
    high = config.scaling["high_freq_factor"]
    turns = config.scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / factor


def _yarn(plain: torch.Tensor, config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Blend by dimension between kept and stretched, and sharpen attention to make up for it."""
    factor = config.scaling["factor"]
    original = config.scaling["original_max_position_embeddings"]

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first = dimension_of(config.scaling.get("beta_fast", 32.0))
    last = dimension_of(config.scaling.get("beta_slow", 1.0))
    if config.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = max(last - first, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    amplitude = config.scaling.get("attention_factor")
    if amplitude is None:
        amplitude = _yarn_amplitude(config, factor)
    return frequencies, amplitude


def _yarn_amplitude(config: RopeConfig, factor: float) -> float:
    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    one, all_dims = config.scaling.get("mscale"), config.scaling.get("mscale_all_dim")
    if one and all_dims:
        return sharpened(one) / sharpened(all_dims)
    return sharpened(1.0)
