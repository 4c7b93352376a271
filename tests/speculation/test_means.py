"""What is usual changes slowly, and at once where the load is another one."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from draftgate.speculation.means import LoadMeans, PrefillMeans


def seen(prefill: PrefillMeans) -> dict[int, float]:
    mix = prefill.mix()
    return dict(zip(mix.tokens, mix.shares.tolist(), strict=True))


def test_chunks_count_as_often_as_they_come() -> None:
    prefill = PrefillMeans(64)
    assert seen(prefill) == {0: 1.0}
    for step in range(700):
        prefill.observe(128 if step % 7 == 0 else 0)
    assert seen(prefill) == {0: pytest.approx(6 / 7, abs=0.03), 128: pytest.approx(1 / 7, abs=0.03)}


def test_chunks_of_one_octave_count_as_their_mean_and_old_ones_are_forgotten() -> None:
    prefill = PrefillMeans(64)
    for step in range(600):
        prefill.observe((130, 250)[step % 2])
    [(tokens, share)] = seen(prefill).items()
    assert tokens == pytest.approx(190, abs=3)
    assert share == 1.0
    for _ in range(600):
        prefill.observe(0)
    assert seen(prefill) == {0: 1.0}


@settings(max_examples=60)
@given(st.lists(st.integers(0, 5000), max_size=200))
def test_shares_are_shares(chunks: list[int]) -> None:
    prefill = PrefillMeans(32)
    for chunk in chunks:
        prefill.observe(chunk)
        mix = prefill.mix()
        assert mix.shares.sum() == pytest.approx(1.0)
        assert (mix.shares > 0).all()
        assert all(0 <= tokens <= 5000 for tokens in mix.tokens)


def test_one_step_moves_a_mean_little() -> None:
    means = LoadMeans(16)
    for _ in range(50):
        means.observe(8, np.array([[8.0, 16.0], [4.0, 5.0]]))
    after = means.observe(9, np.array([[9.0, 0.0], [4.0, 50.0]]))
    assert after[0, 1] == pytest.approx(15.0)


@pytest.mark.parametrize(("before", "now"), [(8, 24), (240, 120), (24, 1), (1, 8), (2, 60)])
def test_another_load_begins_anew(before: int, now: int) -> None:
    means = LoadMeans(16)
    for _ in range(50):
        means.observe(before, np.array([[1.0], [1.0]]))
    assert means.begins(now)
    assert means.observe(now, np.array([[7.0], [2.0]])).tolist() == [[7.0], [2.0]]
    assert not means.begins(now)


@pytest.mark.parametrize(("before", "now"), [(4, 6), (1, 3), (3, 1), (64, 72), (240, 215)])
def test_rows_that_come_and_go_are_the_same_load(before: int, now: int) -> None:
    means = LoadMeans(16)
    for _ in range(50):
        means.observe(before, np.array([[1.0], [1.0]]))
    assert not means.begins(now)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), min_size=1, max_size=80))
def test_a_mean_lies_among_what_it_is_of(steps: list[tuple[int, float]]) -> None:
    means = LoadMeans(8)
    for rows, value in steps:
        mean = means.observe(rows, np.array([[value], [1.0]]))[0, 0]
        assert min(v for _, v in steps) - 1e-9 <= mean <= max(v for _, v in steps) + 1e-9
