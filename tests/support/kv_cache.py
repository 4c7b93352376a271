"""Recognisable values in the KV cache of the tiny model."""

from __future__ import annotations

import torch

from draftgate.checkpoint.architectures import model_shape
from draftgate.engine.kv_cache import KVCache
from tests.support.tiny_models import TINY

SHAPE = model_shape(TINY)
WIDTH = 2 * SHAPE.kv_heads * SHAPE.head_dim


def write(store: KVCache, slot: int, start: int, values: list[float]) -> None:
    """Fill positions from `start` on, each with a value of its own in every layer."""
    index = torch.arange(store.index_of(slot, start), store.index_of(slot, start + len(values)))
    for layer in range(SHAPE.layers):
        column = torch.tensor(values).unsqueeze(1)
        sides = torch.cat([column.expand(-1, WIDTH // 2), -column.expand(-1, WIDTH // 2)], dim=1)
        store.write(layer, index, sides + layer)


def stored(store: KVCache, slot: int, tokens: int) -> list[float]:
    """The values written, read back through every layer, head, key and value."""
    seen = []
    for layer in range(SHAPE.layers):
        keys, values = store.read(layer, slot, slot + 1, tokens)
        assert keys.shape == (1, SHAPE.kv_heads, tokens, SHAPE.head_dim)
        for side, sign in ((keys, 1), (values, -1)):
            column = sign * (side[0] - layer)  # [kv_heads, tokens, head_dim]
            assert (column == column[:1, :, :1]).all()
            seen.append(column[0, :, 0].tolist())
    assert all(other == seen[0] for other in seen)
    return seen[0]
