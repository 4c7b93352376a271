"""A tiny model that speaks: random weights, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path

from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.tiny_models import TINY, write_checkpoint

__all__ = ["SPOKEN", "write_spoken_model"]

SPOKEN = {**TINY, "vocab_size": 256, "eos_token_id": None}
"""A tiny model whose tokens are bytes, and whose answers are as long as they may be."""


def write_spoken_model(folder: Path) -> Path:
    """`SPOKEN` with a tokenizer and a chat template."""
    return write_byte_tokenizer(write_checkpoint(folder, SPOKEN))
