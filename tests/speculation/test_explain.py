"""The textbook's numbers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.errors import DraftgateError
from draftgate.speculation.explain import (
    break_even_acceptance,
    expected_tokens,
    explain,
    speedup,
)


def test_expected_tokens_are_those_of_the_textbook() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0.5, 4) == pytest.approx(1.9375)
    assert expected_tokens(0.0, 4) == 1.0
    assert expected_tokens(1.0, 4) == 5.0


@given(st.floats(0, 0.999), st.integers(0, 20))
def test_they_are_the_closed_formula(alpha: float, draft_len: int) -> None:
    closed = (1 - alpha ** (draft_len + 1)) / (1 - alpha)
    assert expected_tokens(alpha, draft_len) == pytest.approx(closed)


def test_where_four_drafts_at_a_tenth_pay_exactly_nothing() -> None:
    found = break_even_acceptance(4, 0.1)
    assert found is not None
    assert expected_tokens(found, 4) == pytest.approx(1.4)
    assert speedup(found, 4, 0.1) == pytest.approx(1.0)
    assert speedup(found - 0.01, 4, 0.1) < 1 < speedup(found + 0.01, 4, 0.1)


def test_what_never_pays_has_no_break_even() -> None:
    assert break_even_acceptance(4, 1.5) is None
    assert break_even_acceptance(0, 0.1) is None


def test_the_best_draft_length_is_the_best() -> None:
    found = explain(0.8, 4, 0.1)
    assert found.speedup == pytest.approx(3.3616 / 1.4)
    assert found.best_speedup == pytest.approx(max(speedup(0.8, k, 0.1) for k in range(17)))
    assert found.best_speedup == pytest.approx(speedup(0.8, found.best_draft_len, 0.1))
    assert explain(0.05, 4, 0.1).best_draft_len == 0


def test_a_full_batch_makes_verified_tokens_dear() -> None:
    assert explain(0.8, 4, 0.05, token_cost=0.02, rows=1).speedup > 2
    full = explain(0.8, 4, 0.05, token_cost=0.02, rows=64)
    assert full.speedup < 1
    assert full.verify_cost == pytest.approx(1 + 4 * 0.02 * 64)
    assert full.best_draft_len == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 4, 0.1), "alpha: got 1.5, allowed: 0 to 1"),
        ((float("nan"), 4, 0.1), "alpha: got nan"),
        ((0.5, -1, 0.1), "k: got -1"),
        ((0.5, 65, 0.1), "k: got 65"),
        ((0.5, 4, -0.1), "draft_cost: got -0.1"),
    ],
)
def test_arguments_out_of_range_are_named(
    arguments: tuple[float, int, float], message: str
) -> None:
    with pytest.raises(DraftgateError, match=message):
        explain(*arguments)
    with pytest.raises(DraftgateError, match="batch: got 0"):
        explain(0.5, 4, 0.1, rows=0)
