"""Many passes at once take what the table says of each."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from draftgate.speculation import CostCurve, CostTable
from draftgate.speculation.correction import CostCorrection
from draftgate.speculation.pass_times import PassTimes

POINTS = st.lists(st.integers(1, 600), min_size=1, max_size=6, unique=True).map(sorted)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    curves = {}
    for draft_len in (0, 1, 4):
        tokens = draw(POINTS)
        times = draw(st.lists(st.floats(0.5, 50), min_size=len(tokens), max_size=len(tokens)))
        curves[draft_len] = CostCurve(tuple(tokens), tuple(times), draw(st.floats(0, 0.1)))
    return CostTable(curves)


@settings(max_examples=100)
@example(CostTable({k: CostCurve((1, 2), (1.0, 2.0)) for k in (0, 1, 4)}), [(0, 2, 0.0)], 0)
@given(
    tables(),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 4]), st.integers(1, 3000), st.sampled_from([0.0, 0.3, 1.0])
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 100_000),
)
def test_arrays_say_what_the_table_says(
    table: CostTable, passes: list[tuple[int, int, float]], kv_tokens: int
) -> None:
    correction = CostCorrection()
    correction.observe(100, drafted=True, expected_ms=1.0, measured_ms=1.5)
    correction.observe(30, drafted=False, expected_ms=1.0, measured_ms=0.8)
    times = PassTimes(table, correction)
    lens, tokens, shares = (np.array(each) for each in zip(*passes, strict=True))
    found = times.ms(times.places(lens.tolist()), tokens, kv_tokens, shares)
    for each, draft_len, count, share in zip(found, lens, tokens, shares, strict=True):
        one = times.step_ms(int(draft_len), int(count), kv_tokens, float(share))
        assert each == pytest.approx(one, rel=1e-5)
        if not draft_len or share == 1.0:
            factor = correction.factor(int(count), drafted=draft_len > 0)
            wanted = table.step_ms(int(draft_len), int(count), kv_tokens)
            assert one == pytest.approx(factor * wanted)
    right = PassTimes(table, CostCorrection())
    for draft_len, count, share in passes:
        wanted = table.step_ms(draft_len, count, kv_tokens, share)
        assert right.step_ms(draft_len, count, kv_tokens, share) == pytest.approx(wanted)


def test_rows_that_do_not_draft_cost_what_plain_steps_showed() -> None:
    """The table is wrong by the same factor for all steps with drafts, however many draft."""
    true = CostTable(
        {
            0: CostCurve((1, 4, 64), (5.0, 9.0, 69.0)),
            2: CostCurve((3, 12, 192), (7.0, 12.0, 132.0)),
        }
    )
    for factor in (0.4, 2.5):
        wrong = replace(true, curves={0: true.curves[0], 2: true.curves[2].scaled(factor)})
        times = PassTimes(wrong, CostCorrection())
        for _ in range(200):
            for draft_len, drafted in ((0, 0), (2, 6), (2, 64), (2, 128)):
                share = drafted / 128 if draft_len else 1.0
                true_ms = true.step_ms(draft_len, 64 + drafted, 0, share)
                times.observe(draft_len, 64 + drafted, 0, share, true_ms)
        for drafted in (6, 64, 128):
            found = times.step_ms(2, 64 + drafted, 0, drafted / 128)
            assert found == pytest.approx(true.step_ms(2, 64 + drafted, 0, drafted / 128), rel=0.1)


def test_all_rows_drafting_all_is_what_was_measured() -> None:
    table = CostTable({0: CostCurve((1, 9), (5.0, 9.0)), 1: CostCurve((2, 18), (6.0, 20.0))})
    times = PassTimes(table, CostCorrection())
    tokens = np.array([2, 10, 18, 30])
    assert times.ms(times.places([1]), tokens, 0, None) == pytest.approx([6, 13, 20, 30.5])


def test_a_cliff_stays_one() -> None:
    table = CostTable({0: CostCurve((1, 256, 257), (5.0, 6.0, 20.0))})
    times = PassTimes(table, CostCorrection())
    found = times.ms(times.places([0]), np.array([256, 257]), 0, None)
    assert found == pytest.approx([6.0, 20.0])
    assert 256 in times.bounds
