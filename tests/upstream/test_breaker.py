"""Circuit breaking, on a clock of the test's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftgate.upstream.breaker import Breaker, BreakerLimits, BreakerState

LIMITS = BreakerLimits(failures=3, min_open_s=2.0, max_open_s=10.0, probation_s=5.0)


def opened(now_s: float = 0.0) -> Breaker:
    breaker = Breaker(LIMITS)
    assert breaker.trip(now_s)
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(LIMITS)
    assert [breaker.failed(1.0) for _ in range(3)] == [False, False, True]
    assert breaker.state(1.0) is BreakerState.OPEN
    assert not breaker.failed(1.0)
    assert not breaker.trip(1.0)


def test_a_success_between_them_starts_the_count_again() -> None:
    breaker = Breaker(LIMITS)
    for _ in range(5):
        assert not breaker.failed(1.0)
        assert not breaker.failed(1.0)
        breaker.succeeded()
    assert breaker.state(1.0) is BreakerState.CLOSED


def test_what_ran_since_before_it_opened_closes_nothing() -> None:
    breaker = opened()
    breaker.succeeded()
    assert breaker.state(0.0) is BreakerState.OPEN


def test_a_trial_is_due_after_a_time_that_doubles() -> None:
    breaker = opened(now_s=100.0)
    due_s = 100.0
    for wait_s in (2.0, 4.0, 8.0, 10.0, 10.0):
        assert not breaker.trial_due(due_s + wait_s - 0.001)
        due_s += wait_s
        assert breaker.trial_due(due_s)
        breaker.trial_failed(due_s)
    breaker.hasten()
    assert breaker.trial_due(due_s)


def test_a_good_trial_closes_it_on_probation() -> None:
    breaker = opened()
    breaker.trial_succeeded(3.0)
    assert not breaker.trial_due(100.0)
    assert breaker.state(7.9) is BreakerState.PROBATION
    assert breaker.state(8.0) is BreakerState.CLOSED
    assert not breaker.failed(8.0)


def test_on_probation_one_failure_opens_it_for_twice_as_long() -> None:
    breaker = opened()
    breaker.trial_succeeded(3.0)
    assert breaker.failed(4.0)
    assert not breaker.trial_due(7.9)
    assert breaker.trial_due(8.0)
    breaker.trial_succeeded(8.0)
    # Once probation is over the past is forgotten.
    assert breaker.trip(20.0)
    assert breaker.trial_due(22.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 20.0),
            st.sampled_from(["failed", "succeeded", "trip", "trial", "bad trial", "hasten"]),
        )
    )
)
def test_it_is_never_open_without_an_end(events: list[tuple[float, str]]) -> None:
    breaker = Breaker(LIMITS)
    now_s = 0.0
    for passed_s, event in events:
        now_s += passed_s
        was_open = breaker.state(now_s) is BreakerState.OPEN
        if event == "failed":
            assert breaker.failed(now_s) is (
                breaker.state(now_s) is BreakerState.OPEN and not was_open
            )
        elif event == "trip":
            assert breaker.trip(now_s) is not was_open
        elif event == "trial" and breaker.trial_due(now_s):
            breaker.trial_succeeded(now_s)
        elif event == "bad trial" and breaker.trial_due(now_s):
            breaker.trial_failed(now_s)
        elif event == "hasten":
            breaker.hasten()
        else:
            breaker.succeeded()
        is_open = breaker.state(now_s) is BreakerState.OPEN
        assert breaker.trial_due(now_s + LIMITS.max_open_s) is is_open
