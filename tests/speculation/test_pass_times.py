"""Many passes at once take what the table says of each."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

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


@settings(deadline=None, max_examples=100)
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
        factor = correction.factor(int(count), drafted=draft_len > 0)
        wanted = table.step_ms(int(draft_len), int(count), kv_tokens, float(share))
        assert each == pytest.approx(factor * wanted, rel=1e-6)
        one = times.step_ms(int(draft_len), int(count), kv_tokens, float(share))
        assert one == pytest.approx(factor * wanted)


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
