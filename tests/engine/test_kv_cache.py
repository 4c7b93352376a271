"""Blocks are counted right, rows keep their data through moves, and memory goes back."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftgate.engine import EngineConfig
from draftgate.engine.kv_cache import BLOCK_TOKENS, KVCache, KVShape
from draftgate.errors import DraftgateError, ErrorCode
from tests.support.kv_cache import KV_SHAPE, stored, write
from tests.support.process_memory import resident_bytes

CPU = torch.device("cpu")
SLOT_TOKENS = 96


def cache(blocks: int, rows: int, tokens: int = SLOT_TOKENS) -> KVCache:
    """Of a target and of a drafter with other heads, whose positions cost an eighth more."""
    drafter = KVShape(layers=1, kv_heads=1, head_dim=KV_SHAPE.head_dim * KV_SHAPE.layers // 4)
    shapes = [KV_SHAPE, drafter]
    position_bytes = sum(4 * shape.layers * shape.width for shape in shapes)
    config = EngineConfig(
        kv_cache_bytes=blocks * BLOCK_TOKENS * position_bytes, max_batch_rows=rows
    )
    return KVCache(shapes, config, tokens, torch.float32, CPU)


class CacheMachine(RuleBasedStateMachine):
    """Random rows come, grow, leave; a plain list of what each wrote is the model."""

    @initialize(blocks=st.integers(4, 16))
    def start(self, blocks: int) -> None:
        self.cache = cache(blocks, rows=4)
        self.blocks = blocks
        self.rows: list[list[float]] = []  # by slot
        self.held: list[int] = []  # positions granted, by slot
        self.next_value = 1.0

    @precondition(lambda self: len(self.rows) < 4)
    @rule(tokens=st.integers(1, SLOT_TOKENS))
    def join(self, tokens: int) -> None:
        slot = len(self.rows)
        if self._grow(slot, 0, tokens):
            self.rows.append([])
            self.held.append(tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        tokens = data.draw(st.integers(1, SLOT_TOKENS))
        if self._grow(slot, self.held[slot], tokens):
            self.held[slot] = max(self.held[slot], tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        """Down to no less than what is written: a rejected draft's block is free again."""
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        tokens = data.draw(st.integers(len(self.rows[slot]), SLOT_TOKENS))
        self.cache.shrink(slot, tokens)
        self.held[slot] = min(self.held[slot], tokens)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        start = data.draw(st.integers(0, len(self.rows[slot])))
        count = data.draw(st.integers(0, self.held[slot] - start))
        values = [self.next_value + i for i in range(count)]
        self.next_value += count
        write(self.cache, slot, start, values)
        self.rows[slot][start:] = values  # what was beyond is overwritten or not read again

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """The last row closes the gap, as the scheduler does."""
        slot = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.release(slot)
        last, held = self.rows.pop(), self.held.pop()
        if slot < len(self.rows):
            self.cache.move(len(self.rows), slot, len(last))
            self.rows[slot], self.held[slot] = last, held

    @invariant()
    def every_row_reads_back(self) -> None:
        for slot, values in enumerate(self.rows):
            assert stored(self.cache, slot, len(values)) == values

    @invariant()
    def blocks_add_up(self) -> None:
        wanted = sum(-(-tokens // BLOCK_TOKENS) for tokens in self.held)
        assert self.cache.used_blocks == wanted
        assert self.cache.free_blocks == self.blocks - wanted >= 0

    def _grow(self, slot: int, held: int, tokens: int) -> bool:
        more = -(-tokens // BLOCK_TOKENS) - -(-held // BLOCK_TOKENS)
        fits = more <= self.cache.free_blocks
        before = self.cache.used_blocks
        assert self.cache.grow(slot, tokens) == fits
        assert fits or self.cache.used_blocks == before
        return fits


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase


@given(st.integers(1, 400))
def test_a_new_row_of_a_used_slot_starts_at_zero_or_at_what_was_left(tokens: int) -> None:
    """Positions not yet written are finite: attention multiplies them by a weight of 0."""
    store = cache(blocks=60, rows=2, tokens=400)
    assert store.grow(1, tokens)
    write(store, 1, 0, [1.0] * tokens)
    store.release(1)
    keys, values = store.stores[0].read(0, 1, 2, 400)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


def test_a_budget_too_small_for_a_block_per_row_is_refused() -> None:
    with pytest.raises(DraftgateError, match="kv_cache_bytes") as caught:
        cache(blocks=3, rows=4)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert str(cache(blocks=4, rows=4).block_bytes) in caught.value.message


def test_address_space_that_cannot_be_had_is_refused() -> None:
    shape = dataclasses.replace(KV_SHAPE, layers=1 << 20)
    config = EngineConfig(kv_cache_bytes=1 << 50, max_batch_rows=1024)
    with pytest.raises(DraftgateError, match="max_batch_rows") as caught:
        KVCache([shape], config, 1 << 20, torch.float32, CPU)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


def test_memory_is_taken_as_rows_grow_and_given_back_as_they_leave() -> None:
    """A cache of real size: 8 rows of 8,192 positions as address space, a budget for 4,096."""
    shape = KVShape(layers=8, kv_heads=KV_SHAPE.kv_heads, head_dim=64)
    block_bytes = BLOCK_TOKENS * shape.width * 4 * shape.layers
    budget_bytes = 256 * block_bytes
    config = EngineConfig(kv_cache_bytes=budget_bytes, max_batch_rows=8)
    before = resident_bytes()
    cache = KVCache([shape], config, 8192, torch.float32, CPU)
    [store] = cache.stores

    def fill(slot: int, tokens: int) -> None:
        assert cache.grow(slot, tokens)
        index = torch.arange(store.index_of(slot, 0), store.index_of(slot, tokens))
        for layer in range(shape.layers):
            store.write(layer, index, torch.ones(tokens, shape.width))

    def held_bytes() -> int:
        return resident_bytes() - before

    assert held_bytes() < 4 << 20
    for slot in range(8):
        fill(slot, 512)
    assert cache.free_blocks == 0
    assert not cache.grow(0, 513)
    assert abs(held_bytes() - budget_bytes) < 0.1 * budget_bytes
    cache.release(0)
    cache.move(7, 0, 512)
    cache.release(3)
    cache.move(6, 3, 512)
    assert abs(held_bytes() - 0.75 * budget_bytes) < 0.1 * budget_bytes
    cache.shrink(1, 16)  # its memory stays until it leaves
    for slot in (0, 1, 2, 3, 4, 5):
        cache.release(slot)
    assert cache.used_blocks == 0
    assert held_bytes() < 0.1 * budget_bytes
    for _ in range(20):  # reading what nobody wrote takes no memory
        for layer in range(shape.layers):
            store.read(layer, 0, 8, 8192)[0].sum()
    assert held_bytes() < 0.1 * budget_bytes
