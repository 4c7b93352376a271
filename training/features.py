"""The target's hidden states for every token of the generations, on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

__all__ = ["features_path", "read_features", "write_features"]


def features_path(part: Path) -> Path:
    """Where the features of a file of generations are."""
    return part.with_suffix(".features.npy")


def write_features(part: Path, features: torch.Tensor) -> None:
    """features: [tokens, taps * hidden] in bf16: of each generation all tokens but the last."""
    half = part.with_suffix(".half.npy")
    np.save(half, features.contiguous().view(torch.int16).numpy())
    half.rename(features_path(part))


def read_features(part: Path) -> torch.Tensor:
    """What `write_features` wrote, mapped rather than read."""
    held = np.load(features_path(part), mmap_mode="c")
    return torch.from_numpy(held).view(torch.bfloat16)
