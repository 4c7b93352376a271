"""Acceptance is estimated by place, source and request, and forgets at the stated pace."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from draftgate.speculation import AcceptanceEstimator, Outcome

EAGLE, NGRAM = 1, 2


def fed(
    rates: dict[int, list[float]], steps: int, *, rows: int = 8, seed: int = 0, drafted: int = 4
) -> AcceptanceEstimator:
    """An estimator that has seen chains accepted by chance at these conditional rates, by source;
    a row drafts with one source, in turn."""
    random = np.random.default_rng(seed)
    estimator = AcceptanceEstimator(6)
    sources = list(rates)
    for _ in range(steps):
        outcomes = []
        for row in range(rows):
            source = sources[row % len(sources)]
            luck = random.random(drafted) < np.array(rates[source][:drafted])
            outcomes.append(Outcome(row, source, drafted, range(int(luck.cumprod().sum()))))
        estimator.observe(outcomes)
    return estimator


def test_the_rates_of_chains_are_found_by_place_and_source() -> None:
    rates = {EAGLE: [0.6, 0.5, 0.7, 0.4], NGRAM: [0.9, 0.95, 0.9, 0.99]}
    estimator = fed(rates, steps=2000, rows=32)
    for source, wanted in rates.items():
        assert estimator.rates()[source][:4] == pytest.approx(wanted, abs=0.12)
    expected = np.cumprod(rates[EAGLE])
    assert estimator.survival([0, 2])[0][:4] == pytest.approx(expected, abs=0.12)
    expected = np.cumprod(rates[NGRAM])
    assert estimator.survival([1])[0][:4] == pytest.approx(expected, abs=0.08)


def test_a_rejection_hides_what_comes_after_it() -> None:
    """First drafts are never accepted: of the second nothing is known."""
    estimator = AcceptanceEstimator(3)
    before = estimator.rates()[EAGLE]
    for _ in range(50):
        estimator.observe([Outcome(0, EAGLE, 3, ())])
    after = estimator.rates()[EAGLE]
    assert after[0] < 0.1
    # It leans to the place before, as what was never seen does.
    assert after[1] == pytest.approx(after[0])
    assert before[1] == pytest.approx(before[0])


@pytest.mark.parametrize("nothing", [Outcome(0, EAGLE, 0), Outcome(0, EAGLE, 3, (), valid=0)])
def test_steps_without_drafts_and_drafts_that_say_nothing_leave_no_trace(nothing: Outcome) -> None:
    estimator = fed({EAGLE: [0.7] * 4}, steps=20)
    rates, survival = estimator.rates(), estimator.survival([0, 1, 99])
    for _ in range(100):
        estimator.observe([nothing])
        estimator.observe([])
    assert np.array_equal(estimator.rates(), rates)
    assert np.array_equal(estimator.survival([0, 1, 99]), survival)


def test_what_lies_behind_the_end_of_a_row_does_not_count() -> None:
    cut, plain = AcceptanceEstimator(4), AcceptanceEstimator(4)
    cut.observe([Outcome(0, EAGLE, 4, (0, 1), valid=2)])
    plain.observe([Outcome(0, EAGLE, 2, (0, 1))])
    assert np.array_equal(cut.rates(), plain.rates())


def test_places_of_a_tree_are_weighed_by_how_often_they_stand() -> None:
    """Of two rivals the first stands in six steps of ten, the second in three."""
    estimator = AcceptanceEstimator(2)
    for step in range(3000):
        standing = (0,) if step % 10 < 6 else (1,) if step % 10 < 9 else ()
        estimator.observe([Outcome(step % 7, EAGLE, 2, standing)])
    survival = np.cumprod(estimator.rates()[EAGLE])
    assert survival == pytest.approx([0.6, 0.3], abs=0.05)


def test_a_row_is_known_by_its_own_drafts_and_a_new_one_by_all() -> None:
    estimator = AcceptanceEstimator(2)
    for _ in range(60):
        estimator.observe([Outcome(0, EAGLE, 2, (0, 1)), Outcome(1, EAGLE, 2, ())])
    good, bad, new = estimator.survival([0, 1, 2])
    assert good[0] > 0.8
    assert bad[0] < 0.2
    assert bad[0] < new[0] < good[0]
    estimator.forget(0)
    assert np.array_equal(estimator.survival([0])[0], new)
    estimator.forget(0)  # nobody any more


def test_rows_that_left_make_room() -> None:
    estimator = AcceptanceEstimator(2)
    for row_id in range(5000):
        estimator.observe([Outcome(row_id, EAGLE, 2, (0,))])
        estimator.forget(row_id)
    assert len(estimator._row_used) < 100


@pytest.mark.parametrize("rows", [1, 4, 64, 300])
def test_it_follows_a_change_within_a_few_hundred_steps(rows: int) -> None:
    """At one row a step and at many, and one step of many rows does not erase the past."""
    estimator = AcceptanceEstimator(1)
    for _ in range(300):
        estimator.observe([Outcome(row, EAGLE, 1, (0,)) for row in range(rows)])
    assert estimator.rates()[EAGLE][0] > 0.9
    estimator.observe([Outcome(row, EAGLE, 1, ()) for row in range(rows)])
    assert estimator.rates()[EAGLE][0] > 0.8
    for _ in range(200):
        estimator.observe([Outcome(row, EAGLE, 1, ()) for row in range(rows)])
    assert estimator.rates()[EAGLE][0] < 0.2


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)),
            max_size=6,
            unique_by=lambda given: given[0],
        ),
        max_size=30,
    )
)
def test_survival_is_a_falling_likelihood_whatever_happens(
    steps: list[list[tuple[int, int, int, int]]],
) -> None:
    estimator = AcceptanceEstimator(4)
    for step in steps:
        estimator.observe([Outcome(row, source, n, range(min(a, n))) for row, source, n, a in step])
    survival = estimator.survival([0, 1, 2, 3, 4, 5, 77])
    assert survival.shape == (7, 4)
    assert np.isfinite(survival).all()
    assert (survival > 0).all()
    assert (survival <= 1).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert estimator.survival([]).shape == (0, 4)
