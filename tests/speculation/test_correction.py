"""A table that is wrong is put right where it is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from draftgate.speculation.correction import CostCorrection


def run(correction: CostCorrection, tokens: int, ratio: float, steps: int = 30) -> None:
    for _ in range(steps):
        correction.observe(tokens, drafted=True, expected_ms=10.0, measured_ms=10.0 * ratio)


def test_nothing_seen_changes_nothing() -> None:
    correction = CostCorrection()
    assert {correction.factor(2**n, drafted=n % 2 > 0) for n in range(20)} == {1.0}
    assert correction.learned() == []


def test_it_learns_where_the_table_is_wrong_and_not_below() -> None:
    correction = CostCorrection()
    run(correction, 100, 1.0)
    run(correction, 200, 1.6)
    assert correction.factor(200, drafted=True) == pytest.approx(1.6, rel=0.03)
    assert correction.factor(100, drafted=True) == pytest.approx(1.0, rel=0.03)
    # What has not run believes the nearest that has.
    assert correction.factor(250, drafted=True) > 1.3
    assert correction.factor(1000, drafted=True) < 1.35
    assert 1.1 < correction.factor(200, drafted=False) < 1.6


def test_its_own_steps_outweigh_what_neighbours_say() -> None:
    correction = CostCorrection()
    for tokens in (80, 128, 160, 200, 256):
        run(correction, tokens, 1.6)
    run(correction, 100, 1.0)
    assert correction.factor(100, drafted=True) == pytest.approx(1.0, rel=0.04)


def test_a_hiccup_counts_for_little() -> None:
    correction = CostCorrection()
    run(correction, 64, 1.0)
    correction.observe(64, drafted=True, expected_ms=10.0, measured_ms=10_000.0)
    assert correction.factor(64, drafted=True) < 1.25
    run(correction, 64, 1.0)
    assert correction.factor(64, drafted=True) == pytest.approx(1.0, rel=0.03)


def test_a_lone_plain_step_says_little_of_others() -> None:
    correction = CostCorrection()
    correction.observe(2, drafted=False, expected_ms=10.0, measured_ms=14.0)
    assert correction.factor(120, drafted=False) < 1.15
    run(correction, 120, 1.0, steps=2000)
    assert correction.factor(120, drafted=False) == pytest.approx(1.0, abs=0.05)
    assert correction.plain_factors(np.array([120])) == pytest.approx(1.0, abs=0.05)


def test_a_machine_that_becomes_slower_is_slower_everywhere() -> None:
    correction = CostCorrection()
    run(correction, 16, 1.0, steps=100)
    run(correction, 64, 1.2, steps=100)
    run(correction, 64, 1.2 * 1.5, steps=12)
    assert correction.factor(64, drafted=True) == pytest.approx(1.8, rel=0.15)
    ratio = correction.factor(64, drafted=True) / correction.factor(16, drafted=True)
    # So where it was not tried lately looks no better than before, whatever the machine does.
    assert ratio == pytest.approx(1.2, rel=0.2)
    # What lasts is learned where it was seen alone.
    run(correction, 64, 1.2 * 1.5, steps=300)
    assert correction.factor(64, drafted=True) == pytest.approx(1.8, rel=0.03)
    assert correction.factor(16, drafted=True) < 1.1


def test_a_bucket_that_is_new_is_learned_itself() -> None:
    """A table that is wrong at the start is put right within a few steps, and only there."""
    correction = CostCorrection()
    run(correction, 16, 1.0, steps=100)
    run(correction, 200, 1.6, steps=8)
    assert correction.factor(200, drafted=True) == pytest.approx(1.6, rel=0.05)
    assert correction.factor(16, drafted=True) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("tokens", [1, 2, 7, 1000, 10**6])
def test_noise_averages_out(tokens: int) -> None:
    correction = CostCorrection()
    random = np.random.default_rng(tokens)
    for ratio in random.lognormal(np.log(1.3), 0.2, 200):
        correction.observe(tokens, drafted=False, expected_ms=5.0, measured_ms=5.0 * ratio)
    assert correction.factor(tokens, drafted=False) == pytest.approx(1.3, rel=0.15)
    [(least, drafted, ratio, seen)] = correction.learned()
    assert least <= tokens
    assert (drafted, seen) == (False, 40.0)
    assert ratio == pytest.approx(1.3, rel=0.15)
