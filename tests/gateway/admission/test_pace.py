"""How fast places come free."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.admission.pace import Pace


def test_nothing_is_known_before_as_many_ended_as_are_held() -> None:
    pace = Pace(0.0)
    assert pace.ends_per_s(2) is None
    pace.advance(2, 5.0)
    pace.end(2)
    assert pace.ends_per_s(2) is None
    pace.end(1)
    assert pace.ends_per_s(2) == pytest.approx(2 / 5, rel=0.02)


@given(held=st.integers(1, 256), hold_s=st.floats(0.1, 300), rounds=st.integers(1, 40))
def test_the_pace_is_found_at_any_occupancy(held: int, hold_s: float, rounds: int) -> None:
    pace = Pace(0.0)
    for number in range(rounds):
        pace.advance(held, (number + 1) * hold_s)
        for left in range(held, 0, -1):
            pace.end(left)
    found = pace.ends_per_s(1)
    # What ends in one moment counts for a little more than what came before.
    assert found == pytest.approx(1 / hold_s, rel=0.15)


def test_it_follows_a_change() -> None:
    pace = Pace(0.0)
    now_s = 0.0
    for hold_s in [1.0] * 100 + [10.0] * 100:
        now_s += hold_s
        pace.advance(8, now_s)
        for left in range(8, 0, -1):
            pace.end(left)
    assert pace.ends_per_s(8) == pytest.approx(0.8, rel=0.15)


def test_stalled_places_slow_it_down() -> None:
    pace = Pace(0.0)
    for number in range(10):
        pace.advance(4, number + 1.0)
        for _ in range(4):
            pace.end(4)
    before = pace.ends_per_s(4)
    pace.advance(4, 1000.0)
    after = pace.ends_per_s(4)
    assert before is not None
    assert after is not None
    assert after < before / 10
