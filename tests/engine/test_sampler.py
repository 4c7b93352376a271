"""The sampler against plain float64 arithmetic."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from draftgate.engine.drafters.selection import pick
from draftgate.engine.sampler import RowSampler, draw, filter_probabilities
from draftgate.sampling import GREEDY_TEMPERATURE, SamplingParams, Verification

CPU = torch.device("cpu")


def params(**settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **settings)  # type: ignore[arg-type]


def sampler(
    vocab: int, prompt: list[int] | None = None, output: list[int] | None = None, **settings: object
) -> RowSampler:
    return RowSampler(params(**settings), prompt or [0], output or [], vocab, CPU)


def naive(
    logits: list[float], given_params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """The distribution to draw from, token by token as the documentation says it."""
    scores = list(logits)
    for token in set(prompt) | set(output):
        penalty = given_params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= given_params.frequency_penalty * output.count(token)
        scores[token] -= given_params.presence_penalty
    top = max(scores)
    p = np.array([math.exp((s - top) / given_params.temperature) for s in scores])
    p /= p.sum()
    p[p < given_params.min_p * p.max()] = 0.0
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if given_params.top_k:
        p[order[given_params.top_k :]] = 0.0
        p /= p.sum()
    before = 0.0
    for token in order:
        share = p[token]
        if before >= given_params.top_p:
            p[token] = 0.0
        before += share
    return p / p.sum()


@st.composite
def cases(draw_from: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], list[int]]:
    vocab = draw_from(st.integers(2, 40))
    # Multiples of an odd step, and odd penalties: no two scores tie by accident, and no cut falls
    # on a rounding.
    steps = draw_from(st.lists(st.integers(-60, 60), min_size=vocab, max_size=vocab, unique=True))
    logits = [step * 0.0917 for step in steps]
    tokens = st.lists(st.integers(0, vocab - 1), max_size=12)
    chosen = params(
        temperature=draw_from(st.sampled_from([0.3, 0.7, 1.0, 1.9])),
        top_k=draw_from(st.integers(0, vocab + 3)),
        top_p=draw_from(st.sampled_from([0.0137, 0.3519, 0.7113, 0.9371, 1.0])),
        min_p=draw_from(st.sampled_from([0.0, 0.0211, 0.2713, 1.0])),
        repetition_penalty=draw_from(st.sampled_from([0.7717, 1.0, 1.2947])),
        presence_penalty=draw_from(st.sampled_from([-1.3, 0.0, 0.57])),
        frequency_penalty=draw_from(st.sampled_from([-0.7, 0.0, 0.43])),
    )
    return logits, chosen, draw_from(tokens), draw_from(tokens)


@settings(max_examples=400)
@given(cases())
def test_filters_and_penalties_are_the_documented_ones(
    case: tuple[list[float], SamplingParams, list[int], list[int]],
) -> None:
    logits, chosen, prompt, output = case
    row = RowSampler(chosen, prompt, output, len(logits), CPU)
    got = row.probabilities(torch.tensor([logits]), [])[0]
    wanted = naive(logits, chosen, prompt, output)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-4, atol=1e-6)


@settings(max_examples=150)
@given(cases(), st.data())
def test_a_drafted_token_counts_like_an_emitted_one(
    case: tuple[list[float], SamplingParams, list[int], list[int]], data: st.DataObject
) -> None:
    logits, chosen, prompt, output = case
    drafts = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=4))
    row = RowSampler(chosen, prompt, output, len(logits), CPU)
    together = row.probabilities(torch.tensor([logits] * (len(drafts) + 1)), drafts)
    for position, got in enumerate(together):
        emitted = RowSampler(chosen, prompt, output, len(logits), CPU)
        emitted.observe(drafts[:position])
        wanted = emitted.probabilities(torch.tensor([logits]), [])[0]
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    again = row.probabilities(torch.tensor([logits]), [])
    torch.testing.assert_close(again[0], together[0])  # drafts leave no trace


def test_greedy_penalties_follow_the_drafts_before_each_position() -> None:
    row = sampler(4, prompt=[1], output=[2], repetition_penalty=2.0, frequency_penalty=0.5)
    logits = torch.tensor([[1.0, 4.0, 3.0, -1.0]] * 3)
    got = row.penalised(logits, [2, 3])
    assert got.tolist() == [
        [1.0, 2.0, 1.0, -1.0],
        [1.0, 2.0, 0.5, -1.0],
        [1.0, 2.0, 0.5, -2.5],
    ]


def test_presence_counts_the_output_and_repetition_the_prompt_too() -> None:
    row = sampler(3, prompt=[0], output=[1, 1], presence_penalty=1.5)
    assert row.penalised(torch.zeros(1, 3), []).tolist() == [[0.0, -1.5, 0.0]]
    row = sampler(3, prompt=[0], output=[1, 1], repetition_penalty=4.0)
    assert row.penalised(torch.ones(1, 3), []).tolist() == [[0.25, 0.25, 1.0]]


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
def test_top_k_keeps_exactly_k_of_tied_tokens(top_k: int) -> None:
    kept = filter_probabilities(torch.full((3, 8), 0.125), params(top_k=top_k))
    assert (kept > 0).sum(-1).tolist() == [top_k] * 3
    torch.testing.assert_close(kept.sum(-1), torch.ones(3))


def test_min_p_keeps_every_token_tied_with_the_best() -> None:
    kept = filter_probabilities(torch.tensor([[0.4, 0.4, 0.2]]), params(min_p=1.0))
    assert kept.tolist() == [[0.5, 0.5, 0.0]]


def test_top_p_keeps_the_first_token_however_small_it_is() -> None:
    kept = filter_probabilities(torch.tensor([[0.2, 0.5, 0.3]]), params(top_p=1e-9))
    assert kept.tolist() == [[0.0, 1.0, 0.0]]


def test_top_p_looks_past_its_first_candidates() -> None:
    """A flat distribution over a real vocabulary, next to a peaked one that needs no second look:
    each keeps what it keeps alone."""
    flat = torch.linspace(1.0, 2.0, 49152).softmax(0)
    peaked = torch.linspace(0.0, 400.0, 49152).softmax(0)
    together = filter_probabilities(torch.stack([flat, peaked]), params(top_p=0.9))
    for row, probabilities in zip(together, (flat, peaked), strict=True):
        lone = filter_probabilities(probabilities[None], params(top_p=0.9))[0]
        torch.testing.assert_close(row, lone, rtol=1e-5, atol=0.0)
        kept = probabilities[row > 0].double()
        assert kept.sum() >= 0.9 - 1e-5
        assert kept.sum() - kept.min() < 0.9 + 1e-5
        assert kept.min() >= probabilities[row == 0].max()


@pytest.mark.parametrize("temperature", [GREEDY_TEMPERATURE, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_extreme_settings_still_give_a_distribution(
    temperature: float, scale: float, penalty: float
) -> None:
    logits = torch.linspace(-1.0, 1.0, 50).mul(scale).repeat(2, 1)
    row = sampler(
        50,
        prompt=[49],
        temperature=temperature,
        repetition_penalty=penalty,
        top_p=0.999,
        min_p=1e-3,
    )
    got = row.probabilities(logits, [3])
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.sum(-1), torch.ones(2))
    assert 0 <= draw(got[0], row.generator) < 50


def test_a_temperature_of_almost_nothing_is_greedy() -> None:
    assert params(temperature=1e-6).greedy
    assert params(temperature=0.0).greedy
    assert not params(temperature=GREEDY_TEMPERATURE).greedy
    sharp = sampler(3, temperature=GREEDY_TEMPERATURE).probabilities(
        torch.tensor([[1.0, 1.001, 0.5]]), []
    )
    torch.testing.assert_close(sharp, torch.tensor([[0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_seed_is_its_own(seed: int) -> None:
    flat = torch.full((200, 64), 1 / 64)
    tokens = sampler(64, seed=seed).coupled(flat, range(17, 217))
    assert tokens == sampler(64, seed=seed).coupled(flat, range(17, 217))
    assert tokens[5:] == sampler(64, seed=seed).coupled(
        flat[5:], range(22, 217)
    )  # by absolute position
    other = sampler(64, seed=seed ^ 1).coupled(flat, range(17, 217))
    same = sum(a == b for a, b in zip(tokens, other, strict=True))
    assert same < 20  # about 200 / 64 by chance
    assert len(set(tokens)) > 40


def test_noise_is_that_of_the_seed_and_the_position() -> None:
    row = sampler(500, seed=2**64 - 1)
    for position in (0, 17, 2**40):
        counter = np.random.Philox(key=2**64 - 1, counter=[0, 0, 0, position])
        expected = np.random.Generator(counter).standard_exponential(500)
        assert torch.equal(row.noise(position), torch.from_numpy(expected))
    p = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).softmax(-1)
    races = [p[index].double() / row.noise(40 + index) for index in range(3)]
    assert row.coupled(p, [40, 41, 42]) == [int(race.argmax()) for race in races]


def test_noise_of_the_last_positions_is_drawn_once() -> None:
    row = sampler(64, seed=5)
    drafting = [row.noise(position) for position in range(8, 12)]
    row.coupled(torch.full((4, 64), 1 / 64), range(8, 12))
    assert all(row.noise(8 + index) is noise for index, noise in enumerate(drafting))
    first = row.noise(100)
    latest = [row.noise(position) for position in range(101, 200)][-1]
    assert row.noise(199) is latest
    assert row.noise(100) is not first  # so many and no more
    assert torch.equal(row.noise(100), first)


def test_without_a_seed_every_row_has_its_own_noise() -> None:
    one, two = (sampler(64, verification=Verification.COUPLED) for _ in range(2))
    assert one.noise(3) is one.noise(3)
    assert not torch.equal(one.noise(3), two.noise(3))


def test_random_numbers_follow_all_of_the_seed_and_where_the_run_starts() -> None:
    def numbers(seed: int | None, output: list[int] | None = None) -> tuple[float, ...]:
        row = sampler(64, output=output, seed=seed)
        return tuple(torch.rand(4, generator=row.generator).tolist())

    runs = [(seed, [7] * resumed) for seed in (0, 1, 2**32 + 1, 2**64 - 1) for resumed in (0, 1, 2)]
    assert [numbers(*run) for run in runs] == [numbers(*run) for run in runs]
    assert len({numbers(*run) for run in runs}) == len(runs)
    assert numbers(None) != numbers(None)


@pytest.mark.parametrize(
    ("settings", "coupled"),
    [
        ({}, False),
        ({"seed": 0}, True),
        ({"verification": Verification.REJECTION}, False),
        ({"verification": Verification.REJECTION, "seed": 0}, False),
        ({"verification": Verification.COUPLED}, True),
        ({"verification": Verification.COUPLED, "seed": 0}, True),
        ({"verification": Verification.COUPLED, "seed": 0, "temperature": 0.0}, False),
    ],
)
def test_the_verification_of_a_request(settings: dict[str, object], coupled: bool) -> None:
    assert params(**settings).coupled is coupled


def test_a_seed_never_picks_a_token_that_was_filtered_out() -> None:
    kept = torch.zeros(500, 64)
    kept[:, 7] = 0.999
    kept[:, 9] = 0.001
    assert set(sampler(64, seed=3).coupled(kept, range(500))) <= {7, 9}


@pytest.mark.parametrize("settings", [{}, {"seed": 1, "verification": Verification.REJECTION}])
def test_drafts_of_a_large_vocabulary_are_as_unlikely(settings: dict[str, object]) -> None:
    """As below, for what a drafter draws."""
    vocab, draws, rows = 49152, 2000, 20
    logits = torch.full((rows, vocab), math.log(1e-10))
    logits[:, 0] = 0.0
    samplers = [sampler(vocab, **settings) for _ in range(rows)]
    generator = torch.Generator().manual_seed(0)
    drawn = [pick(logits, samplers, range(rows), None, generator).ids for _ in range(draws // rows)]
    assert {token for ids in drawn for token in ids} == {0}


@pytest.mark.parametrize("seed", [None, 12345])
def test_unlikely_tokens_of_a_large_vocabulary_stay_unlikely(seed: int | None) -> None:
    """49,151 tokens share a mass of 5e-6 among them: none should come up in 2,000 draws. Random
    numbers too coarse for so many tokens show as one that does."""
    vocab, draws = 49152, 2000
    p = torch.full((vocab,), 1e-10)
    p[0] = 1.0
    row = sampler(vocab, seed=seed)
    if seed is None:
        tokens = [draw(p, row.generator) for _ in range(draws)]
    else:
        tokens = row.coupled(p.expand(draws, vocab), range(draws))
    assert set(tokens) == {0}
