"""The KV cache: one slot of contiguous positions per row, memory only for what is used.

Attention on a CPU wants each row's positions to lie side by side, and a paged cache would have to
be gathered for every layer of every step. So each row owns a slot as long as the longest sequence,
but the slots are only address space: pages become memory when they are written, blocks of
positions are counted against the budget as rows grow, and a slot's pages go back to the system
when its row leaves (the idea of vAttention, arXiv 2405.04437). On a GPU slots are plain memory, so
there the budget decides how many rows there are.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgate.engine.config import EngineConfig
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["BLOCK_TOKENS", "KVCache", "KVShape", "KVStore"]

_LOG = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Positions in one block, the unit of the budget; a whole number of pages for usual heads."""


@dataclass(frozen=True)
class KVShape:
    """What one model keeps for a position."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Numbers for a position in one layer, keys and values."""
        return 2 * self.kv_heads * self.head_dim


class KVStore:
    """One model's keys and values in every slot: what its attention reads and writes."""

    def __init__(
        self, shape: KVShape, slots: int, slot_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self._slots = slots
        self._slot_tokens = slot_tokens
        extents = (shape.layers, slots, slot_tokens, 2, shape.kv_heads, shape.head_dim)
        self._memory = _LazyMemory(extents, dtype) if device.type == "cpu" else None
        self._tensor = (
            self._memory.tensor
            if self._memory is not None
            else torch.zeros(extents, dtype=dtype, device=device)
        )
        self._flat = [layer.view(-1, shape.width) for layer in self._tensor]

    def write(self, layer: int, index: torch.Tensor, kv: torch.Tensor) -> None:
        """Store keys and values kv [tokens, 2 * kv_heads * head_dim] at `index` [tokens]."""
        self._flat[layer].index_copy_(0, index, kv)

    def index_of(self, slot: int, position: int) -> int:
        """Where `write` puts a slot's position."""
        return slot * self._slot_tokens + position

    def read(
        self, layer: int, first_slot: int, last_slot: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values, each [slots, kv_heads, tokens, head_dim]."""
        held = self._tensor[layer, first_slot:last_slot, :tokens]
        return held[:, :, 0].transpose(1, 2), held[:, :, 1].transpose(1, 2)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy a slot's first `tokens` positions to another."""
        self._tensor[:, target, :tokens] = self._tensor[:, source, :tokens]

    def pick(self, slot: int, first: int, places: Sequence[int]) -> None:
        """Copy these places of a slot to `first` and the ones after it, in order."""
        if list(places) != list(range(first, first + len(places))):
            index = torch.tensor(places, device=self._tensor.device)
            picked = self._tensor[:, slot].index_select(1, index)
            self._tensor[:, slot, first : first + len(places)] = picked

    def give_back(self, slot: int, tokens: int) -> None:
        """Return the memory of a slot's first `tokens` positions to the system."""
        if self._memory is None:
            return
        position_bytes = self.shape.width * self._tensor.element_size()
        for layer in range(self.shape.layers):
            start = (layer * self._slots + slot) * self._slot_tokens
            self._memory.give_back(start * position_bytes, tokens * position_bytes)


class KVCache:
    """Keys and values of every row, of one model or of several that take in the same tokens.

    Rows are slots 0 to `max_rows` - 1. A drafter's store has the slots of the target's, so a row
    grows, moves and leaves in both at once.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        engine: EngineConfig,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shapes`: the models' in the order of `stores`; `max_tokens`: longest sequence, in
        positions.

        Raises DraftgateError(FAILED_PRECONDITION) when the budget holds not even one block for
        each row, or the address space cannot be had.
        """
        slot_tokens = -(-max_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        numbers = sum(shape.layers * shape.width for shape in shapes)
        block_bytes = BLOCK_TOKENS * numbers * dtype.itemsize
        self.block_bytes = block_bytes
        self.total_blocks = engine.kv_cache_bytes // block_bytes
        self.max_rows = engine.max_batch_rows
        if device.type != "cpu":
            self.max_rows = _plain_rows(engine, slot_tokens, block_bytes)
        if self.total_blocks < self.max_rows:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"kv_cache_bytes: {engine.kv_cache_bytes} holds {self.total_blocks} blocks of "
                f"{BLOCK_TOKENS} tokens ({block_bytes} bytes each), fewer than "
                f"max_batch_rows = {engine.max_batch_rows} rows can start with",
            )
        self._used = [0] * self.max_rows  # blocks held by each slot
        self._touched = [0] * self.max_rows  # blocks of it that may have become memory
        self.stores = tuple(
            KVStore(shape, self.max_rows, slot_tokens, dtype, device) for shape in shapes
        )

    @property
    def used_blocks(self) -> int:
        return sum(self._used)

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a row of this many positions holds."""
        return -(-tokens // BLOCK_TOKENS)

    def grow(self, slot: int, tokens: int) -> bool:
        """Make room for positions 0 to `tokens` - 1; False, and no change, when none is left."""
        more = self.blocks_for(tokens) - self._used[slot]
        if more > self.free_blocks:
            return False
        self._used[slot] += max(more, 0)
        self._touched[slot] = max(self._touched[slot], self._used[slot])
        return True

    def shrink(self, slot: int, tokens: int) -> None:
        """Free the blocks beyond a row's first `tokens` positions."""
        self._used[slot] = min(self._used[slot], self.blocks_for(tokens))

    def release(self, slot: int) -> None:
        """Give a slot's blocks and memory back."""
        blocks, self._touched[slot], self._used[slot] = self._touched[slot], 0, 0
        if blocks:
            for store in self.stores:
                store.give_back(slot, blocks * BLOCK_TOKENS)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Move a row's first `tokens` positions to a released slot and release its old one."""
        for store in self.stores:
            store.copy(source, target, tokens)
        self._used[target] = self._touched[target] = self._used[source]
        self.release(source)


def _plain_rows(engine: EngineConfig, slot_tokens: int, block_bytes: int) -> int:
    """How many whole slots the budget holds, where they are memory from the start."""
    slot_bytes = slot_tokens // BLOCK_TOKENS * block_bytes
    rows = min(engine.max_batch_rows, engine.kv_cache_bytes // slot_bytes)
    if rows < 1:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"kv_cache_bytes: {engine.kv_cache_bytes} does not hold one sequence of {slot_tokens} "
            f"tokens ({slot_bytes} bytes): raise it or lower max_sequence_tokens",
        )
    if rows < engine.max_batch_rows:
        _LOG.warning("the KV cache holds %d rows of %d tokens", rows, slot_tokens)
    return rows


class _LazyMemory:
    """Zeroed address space that takes memory page by page as it is written."""

    def __init__(self, extents: tuple[int, ...], dtype: torch.dtype) -> None:
        size_bytes = dtype.itemsize
        for extent in extents:
            size_bytes *= extent
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        try:
            self._map = mmap.mmap(-1, size_bytes, flags=flags)
        except OSError as error:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"no address space for {size_bytes} bytes of KV cache ({error}): "
                "lower max_batch_rows or max_sequence_tokens",
            ) from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A huge page would make memory of positions that no row has reached.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=dtype).view(extents)

    def give_back(self, start_bytes: int, size_bytes: int) -> None:
        """Return whole pages to the system; what is read there next is zero or what was left."""
        first = -(-start_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start_bytes + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
