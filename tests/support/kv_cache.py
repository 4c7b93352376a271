"""Recognisable values in every store of a KV cache."""

from __future__ import annotations

import torch

from draftgate.checkpoint.architectures import model_shape
from draftgate.engine.kv_cache import KVCache, KVShape
from tests.support.tiny_models import TINY

SHAPE = model_shape(TINY)
KV_SHAPE = KVShape(SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim)


def write(cache: KVCache, slot: int, start: int, values: list[float]) -> None:
    """Fill positions from `start` on, each with a value of its own in every layer."""
    column = torch.tensor(values).unsqueeze(1)
    for store in cache.stores:
        index = torch.arange(store.index_of(slot, start), store.index_of(slot, start + len(values)))
        half = column.expand(-1, store.shape.width // 2)
        for layer in range(store.shape.layers):
            store.write(layer, index, torch.cat([half, -half], dim=1) + layer)


def stored(cache: KVCache, slot: int, tokens: int) -> list[float]:
    """The values written, read back through every store, layer, head, key and value."""
    seen = []
    for store in cache.stores:
        for layer in range(store.shape.layers):
            keys, values = store.read(layer, slot, slot + 1, tokens)
            assert keys.shape == (1, store.shape.kv_heads, tokens, store.shape.head_dim)
            for side, sign in ((keys, 1), (values, -1)):
                column = sign * (side[0] - layer)  # [kv_heads, tokens, head_dim]
                assert (column == column[:1, :, :1]).all()
                seen.append(column[0, :, 0].tolist())
    assert all(other == seen[0] for other in seen)
    return seen[0]
