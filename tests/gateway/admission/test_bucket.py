"""Tokens per minute."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.admission.bucket import TokenBucket


def test_a_minutes_worth_may_go_at_once_and_comes_back_in_a_minute() -> None:
    bucket = TokenBucket(600, 0.0)
    assert bucket.wait_s(600, 0.0) == 0
    bucket.take(600, 0.0)
    assert bucket.wait_s(600, 0.0) == 60
    assert bucket.wait_s(100, 0.0) == 10
    assert bucket.wait_s(100, 10.0) == 0
    assert bucket.wait_s(600, 1000.0) == 0


def test_it_never_holds_more_than_a_minutes_worth() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.settle(500, 0, 100.0)
    bucket.take(600, 100.0)
    assert bucket.wait_s(1, 100.0) == pytest.approx(0.1)


def test_what_was_not_used_comes_back_and_what_was_is_owed() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.take(600, 0.0)
    bucket.settle(600, 200, 0.0)
    assert bucket.wait_s(400, 0.0) == 0
    bucket.settle(0, 500, 0.0)
    assert bucket.wait_s(100, 0.0) == 20


def test_a_new_rate_keeps_what_was_used() -> None:
    bucket = TokenBucket(600, 0.0)
    bucket.take(500, 0.0)
    bucket.resize(1200, 0.0)
    assert bucket.wait_s(700, 0.0) == 0
    assert bucket.wait_s(701, 0.0) == pytest.approx(0.05)
    bucket.resize(300, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(201 * 60 / 300)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(600, 100.0)
    bucket.take(600, 100.0)
    assert bucket.wait_s(100, 50.0) == 10
    assert bucket.wait_s(100, 110.0) == 0


@given(
    per_minute=st.integers(1, 10_000),
    uses=st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 10_000), st.floats(0, 1)), max_size=50
    ),
)
def test_no_stretch_of_time_uses_more_than_its_share_and_one_minute(
    per_minute: int, uses: list[tuple[float, int, float]]
) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    now_s = 0.0
    history: list[tuple[float, int]] = []
    for pause_s, wanted, share in uses:
        now_s += pause_s
        tokens = min(wanted, per_minute)
        if bucket.wait_s(tokens, now_s) == 0:
            used = int(tokens * share)
            bucket.take(tokens, now_s)
            bucket.settle(tokens, used, now_s)
            history.append((now_s, used))
    for start in range(len(history)):
        total = 0
        for at_s, used in history[start:]:
            total += used
            span_s = at_s - history[start][0]
            assert total <= per_minute * (1 + span_s / 60) * 1.000001 + 1e-6


@given(
    per_minute=st.integers(1, 10_000),
    taken=st.lists(st.integers(0, 10_000), max_size=5),
    wanted=st.integers(0, 10_000),
)
def test_the_wait_that_it_names_is_enough(per_minute: int, taken: list[int], wanted: int) -> None:
    bucket = TokenBucket(per_minute, 0.0)
    for tokens in taken:
        bucket.take(tokens, 0.0)
    wanted = min(wanted, per_minute)
    wait_s = bucket.wait_s(wanted, 0.0)
    assert bucket.wait_s(wanted, wait_s) == pytest.approx(0, abs=1e-6)
