"""The laws that the gate is compared with do what their authors say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from draftgate.speculation import CostCurve, CostTable
from draftgate.speculation.crowd import Drafts, Rows
from draftgate.speculation.laws import EmaLaw, FixedLaw, GoodputLaw, Law, TableLaw
from draftgate.speculation.load import Load

LENS = (0, 1, 2, 3, 5, 7)


def load(rows: int, left: int = 100, prefill: int = 0) -> Load:
    return Load(Rows(np.arange(rows), np.full(rows, left)), prefill)


def drive(law: Law, rows: int, rate: float, steps: int, seed: int = 0) -> list[int]:
    """Draft lengths where drafts are accepted at this conditional rate."""
    random = np.random.default_rng(seed)
    lens = []
    for _ in range(steps):
        now = load(rows)
        choice = law.decide(now)
        luck = random.random((rows, 8)) < rate
        accepted: npt.NDArray[np.int64] = np.minimum(
            np.logical_and.accumulate(luck, axis=1).sum(axis=1), choice.row_lens
        )
        law.observe(Drafts(np.arange(rows), choice.row_lens, accepted), now, 10.0)
        lens.append(choice.draft_len)
    return lens


def test_fixed_is_fixed_within_what_rows_have_left() -> None:
    choice = FixedLaw(3).decide(load(4, left=2))
    assert (choice.draft_len, choice.row_lens.tolist()) == (3, [2, 2, 2, 2])


def test_a_table_goes_by_rows() -> None:
    law = TableLaw({4: 3, 16: 1, 64: 0})
    lens = [law.decide(load(rows)).draft_len for rows in (1, 3, 4, 15, 16, 63, 64, 500)]
    assert lens == [0, 0, 3, 3, 1, 1, 0, 0]


def test_ema_follows_acceptance_within_its_class_of_batch_sizes() -> None:
    law = EmaLaw(LENS)
    assert set(drive(law, 2, 0.95, 200)[100:]) == {7}
    assert set(drive(law, 2, 0.1, 200)[100:]) <= {1, 3}
    assert set(drive(law, 16, 0.95, 200)[100:]) == {3}
    assert set(drive(law, 40, 0.95, 50)) == {1}
    assert set(drive(law, 100, 0.95, 50)) == {0}
    # What was learned of small batches is still there.
    assert set(drive(law, 2, 0.1, 20)) <= {1, 3}


def test_ema_always_tries_again_from_nothing() -> None:
    law = EmaLaw(LENS)
    lens = drive(law, 40, 0.02, 400)[100:]
    assert set(lens) == {0, 1}
    assert sum(a != b for a, b in pairwise(lens)) > 20


def test_ema_uses_only_lengths_that_there_are() -> None:
    assert set(drive(EmaLaw((0, 1, 3)), 2, 0.99, 100)) <= {1, 3}


def costs(token_ms: float) -> CostTable:
    tokens = (1, 4096)
    return CostTable(
        {k: CostCurve(tokens, tuple(8 + 0.5 * k + token_ms * t for t in tokens)) for k in LENS}
    )


def test_goodput_takes_the_most_tokens_a_second_by_its_profile() -> None:
    assert set(drive(GoodputLaw(costs(0.01), LENS), 2, 0.9, 400)[300:]) == {7}
    assert set(drive(GoodputLaw(costs(0.01), LENS), 2, 0.5, 400)[300:]) <= {1, 2, 3}
    assert set(drive(GoodputLaw(costs(1.0), LENS), 200, 0.7, 100)[50:]) == {0}


def test_goodput_believes_its_profile_whatever_steps_take() -> None:
    law = GoodputLaw(costs(0.01), LENS)
    now = load(8)
    for _ in range(50):
        choice = law.decide(now)
        accepted = np.minimum(choice.row_lens, 2)
        law.observe(Drafts(np.arange(8), choice.row_lens, accepted), now, 10_000.0)
    assert law.decide(now).draft_len > 0


def test_goodput_leans_to_no_drafts() -> None:
    """By a tenth: what gains less is not drafted."""
    for draft_ms, drafts in ((5.6, False), (5.3, True)):
        table = CostTable({0: CostCurve((1,), (10.0,)), 1: CostCurve((1,), (10.0 + draft_ms,))})
        law = GoodputLaw(table, (0, 1))
        choice = law.decide(load(1))  # it begins with a rate of 0.7
        assert (choice.draft_len > 0) == drafts


def test_goodput_begins_again_when_almost_nothing_is_accepted() -> None:
    law = GoodputLaw(costs(0.001), LENS)
    drive(law, 1, 0.0, 200)
    assert max(drive(law, 1, 0.0, 100)) >= 2


@pytest.mark.parametrize("law", [FixedLaw(3), EmaLaw(LENS), GoodputLaw(costs(0.01), LENS)])
def test_rows_near_their_end_draft_less(law: Law) -> None:
    assert law.decide(load(3, left=1)).row_lens.max() <= 1
    law.forget(0)
