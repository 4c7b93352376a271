"""Attention over ragged rows against one row at a time in float64."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from draftgate.engine import EngineConfig
from draftgate.engine.attention import RowSpan, plan_attention
from draftgate.engine.kv_cache import KVCache, KVStore
from tests.support.kv_cache import KV_SHAPE, SHAPE

CPU = torch.device("cpu")
ROWS = 6
LONGEST = 1600


@pytest.fixture(scope="module")
def store() -> KVStore:
    """Every position of every slot holds something: what is not visible must be masked."""
    config = EngineConfig(max_batch_rows=ROWS, kv_cache_bytes=1 << 30)
    [store] = KVCache([KV_SHAPE], config, LONGEST, torch.float32, CPU).stores
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(store.index_of(0, 0), store.index_of(ROWS - 1, LONGEST))
    kv = torch.randn(len(index), KV_SHAPE.width, generator=generator)
    store.write(0, index, kv)
    return store


def one_row(query: torch.Tensor, span: RowSpan, store: KVStore) -> torch.Tensor:
    """query [count, heads, head_dim] to context, token by token as the formula has it."""
    keys, values = store.read(0, span.slot, span.slot + 1, span.length)
    group = SHAPE.heads // SHAPE.kv_heads
    answers = []
    for token in range(span.count):
        visible = span.start + token + 1
        heads = []
        for head in range(SHAPE.heads):
            k = keys[0, head // group, :visible].double()
            v = values[0, head // group, :visible].double()
            weights = (k @ query[token, head].double() / SHAPE.head_dim**0.5).softmax(0)
            heads.append(weights @ v)
        answers.append(torch.cat(heads))
    return torch.stack(answers)


def check(spans: list[RowSpan], store: KVStore) -> int:
    """Returns how many calls the plan makes."""
    plan = plan_attention(
        spans,
        heads=SHAPE.heads,
        kv_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        dtype=torch.float32,
        device=CPU,
    )
    tokens = sum(span.count for span in spans)
    query = torch.randn(
        tokens, SHAPE.heads, SHAPE.head_dim, generator=torch.Generator().manual_seed(tokens)
    )
    got = plan.attend(query, store, 0)
    first = 0
    for span in spans:
        wanted = one_row(query[first : first + span.count], span, store)
        torch.testing.assert_close(
            got[first : first + span.count].double(), wanted, rtol=1e-4, atol=1e-5
        )
        first += span.count
    assert first == tokens == got.shape[0]
    return len(plan.calls)


@st.composite
def steps(draw: st.DrawFn) -> list[RowSpan]:
    """Some of the slots, in slot order, each decoding, verifying drafts or taking in a prompt."""
    slots = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True))
    spans = []
    for slot in sorted(slots):
        count = draw(st.sampled_from([1, 1, 1, 2, 5, 9, 40]))
        start = draw(st.one_of(st.just(0), st.integers(0, 60), st.integers(800, LONGEST - 40)))
        spans.append(RowSpan(slot, start, count))
    return spans


@settings(max_examples=60)
@given(spans=steps())
def test_every_row_sees_its_own_past_and_nothing_else(store: KVStore, spans: list[RowSpan]) -> None:
    check(spans, store)


def test_rows_that_decode_share_one_call(store: KVStore) -> None:
    assert check([RowSpan(slot, 200 + slot, 1) for slot in range(ROWS)], store) == 1
    assert check([RowSpan(slot, 300, 5) for slot in range(ROWS)], store) == 1
    assert check([RowSpan(0, 300, 1)], store) == 1


def test_a_prompt_chunk_or_a_much_longer_row_has_its_own_call(store: KVStore) -> None:
    decoding = [RowSpan(slot, 20, 1) for slot in range(ROWS - 1)]
    assert check([*decoding, RowSpan(ROWS - 1, 0, 128)], store) == 2
    assert check([*decoding, RowSpan(ROWS - 1, LONGEST - 1, 1)], store) == 2
    assert check([RowSpan(0, LONGEST - 1, 1), *decoding[1:]], store) == 2
