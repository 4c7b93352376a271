"""Drafts go to the likeliest slots, as many as pay, and a row's are always its first ones."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from draftgate.speculation import CostCurve, CostTable, Load, RowLoad
from draftgate.speculation.allocation import Allotment, Slots
from draftgate.speculation.correction import CostCorrection
from draftgate.speculation.pass_times import PassTimes

LENS = (0, 1, 2, 4)


def times(token_ms: float, draft_ms: float = 0.5, cliff_ms: float = 0.0) -> PassTimes:
    """A pass costs so much and each of its tokens, with a cliff behind 64."""
    tokens = (1, 64, 65, 1000)
    curves = {
        k: CostCurve(
            tokens, tuple(8 + draft_ms * k + token_ms * t + cliff_ms * (t > 64) for t in tokens)
        )
        for k in LENS
    }
    return PassTimes(CostTable(curves), CostCorrection())


def load(rows: int, prefill: int = 0) -> Load:
    return Load([RowLoad(i, 100) for i in range(rows)], prefill)


@st.composite
def rows(draw: st.DrawFn) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Survival that falls by place, and how far each row may draft. Ties are common."""
    count = draw(st.integers(1, 12))
    rates = draw(
        st.lists(
            st.lists(st.sampled_from([0.1, 0.5, 0.7, 0.9, 1.0]), min_size=4, max_size=4),
            min_size=count,
            max_size=count,
        )
    )
    lens = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    return np.cumprod(rates, axis=1), np.array(lens)


@settings(max_examples=150)
@given(
    rows(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.001, 0.3, 2.0]),
    st.sampled_from([0.0, 30.0]),
    st.integers(0, 80),
    st.floats(0.05, 3.0),
)
def test_no_budget_is_better(
    given_rows: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]],
    draft_len: int,
    token_ms: float,
    cliff_ms: float,
    prefill: int,
    rate: float,
) -> None:
    survival, most = given_rows
    now, cost = load(len(most), prefill), times(token_ms, cliff_ms=cliff_ms)
    slots = Slots.of(survival[:, :draft_len], most)
    lens, tokens, step_ms = slots.grant(cost, now, draft_len, rate)
    assert (lens <= np.minimum(most, draft_len)).all()
    # A row's drafts are its first places, so what stands is what these promise.
    taken = np.arange(1, 5) <= lens[:, None]
    assert tokens == pytest.approx(len(most) + survival[taken].sum())
    share = lens.sum() / (len(most) * draft_len)
    in_pass = now.plain_tokens + int(lens.sum())
    assert step_ms == pytest.approx(cost.step_ms(draft_len, in_pass, 0, share))
    able = np.arange(1, 5) <= np.minimum(most, draft_len)[:, None]
    worths = sorted(survival[able], reverse=True)
    for budget in range(len(worths) + 1):
        share = budget / (len(most) * draft_len)
        other_ms = cost.step_ms(draft_len, now.plain_tokens + budget, 0, share)
        other = len(most) + sum(worths[:budget]) - rate * other_ms
        assert tokens - rate * step_ms >= other - 1e-6


def test_the_budget_ends_at_a_cliff() -> None:
    survival = np.tile([0.8, 0.6], (40, 1))
    slots = Slots.of(survival, np.full(40, 2))
    lens, _, _ = slots.grant(times(0.01, cliff_ms=30.0), load(40), 2, 4.0)
    assert lens.sum() == 24
    assert lens.max() == 1
    # A prompt in the same pass leaves less room, and where the cliff is passed anyway all is well.
    lens, _, _ = slots.grant(times(0.01, cliff_ms=30.0), load(40, 10), 2, 4.0)
    assert lens.sum() == 14
    lens, _, _ = slots.grant(times(0.01, cliff_ms=30.0), load(40, 200), 2, 4.0)
    assert lens.sum() == 80


def test_the_likelier_rows_get_more() -> None:
    survival = np.array([[0.9, 0.8, 0.7, 0.6], [0.3, 0.1, 0.02, 0.01], [0.6, 0.4, 0.2, 0.1]])
    slots = Slots.of(survival, np.array([4, 4, 4]))
    lens, _, _ = slots.grant(times(0.5), load(3), 4, 0.75)
    assert lens.tolist() == [4, 0, 2]


@settings(max_examples=60)
@given(rows(), st.sampled_from([0.01, 0.3, 2.0]), st.integers(0, 60))
def test_each_draft_length_is_weighed_by_about_its_best_budget(
    given_rows: tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]], token_ms: float, prefill: int
) -> None:
    survival, most = given_rows
    now, cost = load(len(most)), times(token_ms, cliff_ms=10.0)
    chunks = np.array([0, prefill])
    rates = np.array([0.1, 0.3, 0.5, 1.0])
    best = Allotment.best(Slots.of(survival, most), cost, now, LENS, chunks, rates)
    for place, draft_len in enumerate(LENS):
        for kind, chunk in enumerate(chunks.tolist()):
            found = best.tokens[place, kind] - rates[place] * best.times_ms[place, kind]
            if not draft_len:
                plain = len(most) - rates[0] * cost.step_ms(0, len(most) + chunk, 0, 1.0)
                assert found == pytest.approx(plain)
                continue
            slots = Slots.of(survival[:, :draft_len], most)
            _, tokens, step_ms = slots.grant(cost, load(len(most), chunk), draft_len, rates[place])
            assert found <= tokens - rates[place] * step_ms + 1e-6
            assert found >= tokens - rates[place] * step_ms - 0.1 * len(most)


def test_nobody_may_draft() -> None:
    survival = np.full((3, 4), 0.9)
    slots = Slots.of(survival, np.zeros(3, dtype=np.int64))
    lens, tokens, _ = slots.grant(times(0.1), load(3), 4, 1.0)
    assert lens.tolist() == [0, 0, 0]
    assert tokens == 3
