"""What other engines are told, word for word, and what it means in their words."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import given, settings

from draftgate.errors import DraftgateError
from draftgate.speculation import CostCurve, CostTable
from draftgate.speculation.compiler import TARGETS, Range, compile_schedule, schedule

BATCHES = (1, 4, 16, 64, 256)
STEPS_MS = {
    0: (6.5206, 6.6015, 6.8988, 7.7741, 14.4914),
    1: (7.3676, 7.4728, 7.8523, 9.6564, 27.1381),
    3: (8.8407, 8.9812, 9.5183, 13.4979, 41.8484),
    5: (10.3265, 10.4003, 11.1964, 16.8312, 57.4042),
}
"""Llama-3.1-8B with EAGLE on an H100 (vLLM's pull request 32374)."""
SURVIVAL = (0.681, 0.391, 0.204, 0.101, 0.051)

PUBLISHED = CostTable(
    {k: CostCurve(tuple(b * (k + 1) for b in BATCHES), times) for k, times in STEPS_MS.items()}
)


def published() -> list[Range]:
    return schedule(PUBLISHED, SURVIVAL, max_rows=256, draft_lens=PUBLISHED.draft_lens)


def test_the_schedule_of_the_published_grid() -> None:
    ranges = published()
    assert (ranges[0].first, ranges[0].draft_len) == (1, 3)
    assert ranges[-1].draft_len == 0
    assert ranges[-1].last == 256
    assert [r.draft_len for r in ranges] == sorted((r.draft_len for r in ranges), reverse=True)
    assert all(a.last + 1 == b.first for a, b in itertools.pairwise(ranges))
    assert ranges[0].speedup[0] == pytest.approx(2.276 * 6.5206 / 8.8407)


def meant_by_1_2(table: dict[int, int], rows: int) -> int:
    """TensorRT-LLM 1.2.1: the value of the largest key that is no more than the rows."""
    return table[max(key for key in table if key <= rows)]


def meant_by_1_3(table: dict[int, int], rows: int) -> int:
    """Later: the value of the smallest key that is no less; 0 beyond."""
    return table[min(key for key in table if key >= rows)] if rows <= max(table) else 0


def meant_by_vllm(table: list[list[int]], rows: int) -> int:
    return next(k for first, last, k in table if first <= rows <= last)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=6))
def test_each_engine_reads_what_was_meant(spans: list[tuple[int, int]]) -> None:
    """Whatever the ranges; but for one request, where the longest draft is required."""
    ranges, first = [], 1
    for length, draft_len in spans:
        if not ranges or ranges[-1].draft_len != draft_len:
            ranges.append(Range(first, first + length - 1, draft_len, (1.0, 1.0)))
            first += length
    if not any(r.draft_len for r in ranges):
        return
    longest = max(r.draft_len for r in ranges)
    wanted = {rows: r.draft_len for r in ranges for rows in range(r.first, r.last + 1)}
    texts = {name: compile_schedule(name, ranges) for name in TARGETS}
    configs = {name: yaml.safe_load(text)["speculative_config"] for name, text in texts.items()}
    old = configs["tensorrt-llm==1.2.1"]
    assert old["draft_len_schedule"][1] == old["max_draft_len"] == longest
    assert old["eagle3_one_model"] is False
    new = configs["tensorrt-llm>=1.3"]
    table = new["draft_len_schedule"]
    assert table[min(table)] == new["max_draft_len"] == longest
    vllm = configs["vllm"]
    assert vllm["num_speculative_tokens"] == longest
    for rows, draft_len in wanted.items():
        if rows > 1:
            assert meant_by_1_2(old["draft_len_schedule"], rows) == draft_len
            assert meant_by_1_3(table, rows) == draft_len
        assert meant_by_vllm(vllm["num_speculative_tokens_per_batch_size"], rows) == draft_len


def test_a_draft_that_loses_little_is_kept_where_none_would_be_best() -> None:
    """Engines' drafters fall behind while nothing is drafted."""
    flat = CostTable({0: CostCurve((1, 1000), (10.0, 10.0)), 1: CostCurve((1, 1000), (10.3, 10.3))})
    assert [r.draft_len for r in schedule(flat, [0.01], max_rows=9, draft_lens=(0, 1))] == [1]
    dear = CostTable({0: flat.curves[0], 1: CostCurve((1, 1000), (11.0, 11.0))})
    assert [r.draft_len for r in schedule(dear, [0.01], max_rows=9, draft_lens=(0, 1))] == [0]


def test_long_contexts_change_the_schedule() -> None:
    """A pass that mostly reads the context verifies for little more."""
    curves = {k: CostCurve(c.tokens, c.times_ms, 0.039) for k, c in PUBLISHED.curves.items()}
    far = schedule(
        CostTable(curves), SURVIVAL, max_rows=256, draft_lens=(0, 1, 3, 5), context_tokens=8000
    )
    assert far[-1].draft_len > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_rows": 0}, "max_batch_size: got 0"),
        ({"draft_lens": (7,)}, r"draft_lens: got \[7\]"),
        ({"draft_lens": (0,)}, r"draft_lens: got \[0\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, object], message: str) -> None:
    given_: dict[str, object] = {"max_rows": 8, "draft_lens": (0, 1), **arguments}
    with pytest.raises(DraftgateError, match=message):
        schedule(PUBLISHED, SURVIVAL, **given_)  # type: ignore[arg-type]


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(
        DraftgateError, match=r"target: got 'sglang', allowed: tensorrt-llm==1\.2\.1"
    ):
        compile_schedule("sglang", published())
