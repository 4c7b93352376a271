"""Counting acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.telemetry.report import GenerationReport

STEPS = st.lists(
    st.integers(0, 8).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
)


@given(steps=STEPS)
def test_totals_rate_and_length_follow_from_the_steps(steps: list[tuple[int, int]]) -> None:
    report = GenerationReport()
    for drafted, accepted in steps:
        report.add_step(drafted, accepted)
    verified = [(drafted, accepted) for drafted, accepted in steps if drafted]
    drafted_total = sum(drafted for drafted, _ in verified)
    accepted_total = sum(accepted for _, accepted in verified)
    assert report.verify_steps == len(verified)
    assert (report.drafted_tokens, report.accepted_tokens) == (drafted_total, accepted_total)
    assert sum(n * count for n, count in enumerate(report.histogram)) == accepted_total
    if verified:
        assert report.acceptance_rate == pytest.approx(accepted_total / drafted_total)
        assert report.mean_acceptance_length == pytest.approx(1 + accepted_total / len(verified))
        assert report.histogram[-1] > 0
    else:
        assert report.acceptance_rate is None
        assert report.mean_acceptance_length is None
