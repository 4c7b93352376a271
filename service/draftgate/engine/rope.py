"""Rotary position embedding tables.

Formulas: RoFormer (arXiv 2104.09864) section 3.4; linear scaling (arXiv 2306.15595); yarn
(arXiv 2309.00071) section 3; llama3 as in the Llama 3.1 release.
"""

from __future__ import annotations

import math

import torch

from draftgate.checkpoint.architectures import Rope

__all__ = ["RopeTable", "rotate_"]


class RopeTable:
    """cos and signed sin for every position.

    A head's vector x = [a, b] (two halves) becomes x * cos + [b, a] * signed_sin, where
    signed_sin is [-sin, sin].
    """

    def __init__(
        self,
        rope: Rope,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies = _frequencies(rope, head_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
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


def _frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Angular frequencies [head_dim / 2] in radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between are blended."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    turns = rope.original_max_positions * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / rope.factor


def _yarn(plain: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """A ramp over the dimensions from frequencies as they are to stretched ones."""

    def dimension_of(turns: float) -> float:
        scale = math.log(rope.original_max_positions / (turns * 2 * math.pi))
        return head_dim * scale / (2 * math.log(rope.theta))

    first, last = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    span = max(last - first, 0.001)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / span).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)
