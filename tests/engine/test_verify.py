"""Speculation leaves the distribution of every emitted token as it was: chi-square tests.

Drafts are drawn from q, verified by the real functions, and what is emitted at each position is
held against the target's p there. The same check must fail for each of the well-known ways to get
verification wrong.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftgate.engine.sampler as sampler_module
import draftgate.engine.verify as verify_module
from draftgate.engine import Target
from draftgate.engine.drafters.selection import pick
from draftgate.engine.sampler import RowSampler
from draftgate.engine.verify import verify_equal, verify_rejection
from draftgate.sampling import SamplingParams
from tests.support.chi_square import p_value

DRAWS = 12_000
SIGNIFICANT = 1e-4
CPU = torch.device("cpu")

Verify = Callable[..., tuple[int, int]]
"""As `verify_rejection`."""
Targets = Callable[[tuple[int, ...]], torch.Tensor]
"""The target's distributions [K + 1, vocab] for these drafts."""


def p_values(
    targets: Targets,
    draft: torch.Tensor,
    *,
    verify: Verify = verify_rejection,
    draws: int = DRAWS,
    by_chance: bool = True,
    draft_len: Callable[[tuple[int, ...]], int] | None = None,
    vocabulary: torch.Tensor | None = None,
    seed: int = 0,
) -> list[float]:
    """For each position of a step with K drafts from `draft` [K, n], how likely what came out is
    under the target.

    by_chance: whether the verification is told q; else drafts count as proposed without chance.
    draft_len: a rule that lets only so many of these drafts be verified. vocabulary: [n] the
    target's tokens that q is over, None for all.
    """
    count, drafted = draft.shape
    ids = torch.arange(drafted) if vocabulary is None else vocabulary
    vocab = targets((0,) * count).shape[1]
    random = np.random.default_rng(seed)
    columns = [
        random.choice(ids.numpy(), draws, p=row.double().numpy() / row.double().sum().item())
        for row in draft
    ]
    generator = torch.Generator().manual_seed(seed)
    observed = np.zeros((count + 1, vocab))
    runs: Counter[tuple[tuple[int, ...], int]] = Counter()
    for drawn in zip(*(column.tolist() for column in columns), strict=True):
        kept = drawn if draft_len is None else drawn[: draft_len(drawn)]
        q = draft[: len(kept)] if by_chance else None
        accepted, token = verify(targets(drawn)[: len(kept) + 1], kept, q, generator, vocabulary)
        for position, emitted in enumerate((*drawn[:accepted], token)):
            observed[position, emitted] += 1
        runs[drawn, accepted] += 1
    expected = np.zeros((count + 1, vocab))
    for (drawn, accepted), times in runs.items():
        expected[: accepted + 1] += times * targets(drawn)[: accepted + 1].double().numpy()
    return [p_value(*pair) for pair in zip(observed, expected, strict=True)]


def random_rows(rows: int, vocab: int, seed: int, *, sharpness: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, vocab, generator=generator)).softmax(-1)


def related_rows(target: torch.Tensor, seed: int) -> torch.Tensor:
    """Drafter's rows that resemble the target's first K, so that long runs are accepted."""
    count, vocab = target.shape[0] - 1, target.shape[1]
    return 0.6 * target[:-1] + 0.4 * random_rows(count, vocab, seed)


def always(target: torch.Tensor) -> Targets:
    return lambda drafts: target


@pytest.mark.parametrize(("count", "vocab"), [(1, 64), (2, 64), (3, 64), (4, 64), (1, 8), (4, 8)])
def test_rejection_sampling_emits_the_target(count: int, vocab: int) -> None:
    target = random_rows(count + 1, vocab, seed=count)
    values = p_values(always(target), related_rows(target, seed=50 + vocab), seed=vocab + count)
    assert min(values) > SIGNIFICANT


@pytest.mark.parametrize("count", [1, 4])
def test_drafts_proposed_without_chance_emit_the_target(count: int) -> None:
    """The rule must not matter to which token is proposed: any choice of drafts will do."""
    target = random_rows(count + 1, 16, seed=7)
    values = p_values(always(target), related_rows(target, seed=70), by_chance=False, seed=count)
    assert min(values) > SIGNIFICANT


FILTERED = SamplingParams(
    max_tokens=100,
    temperature=0.8,
    top_k=5,
    top_p=0.93,
    min_p=0.02,
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.6,
)


def filtered_targets(count: int) -> Targets:
    """The target with every filter and penalty on: p at a position depends on the drafts before."""
    sampler = RowSampler(FILTERED, [1, 2], [2, 5, 5], 6, CPU)
    logits = 2.0 * torch.randn(count + 1, 6, generator=torch.Generator().manual_seed(count))
    return functools.cache(lambda drafts: sampler.probabilities(logits, drafts))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_filters_and_penalties_leave_it_exact(count: int) -> None:
    targets = filtered_targets(count)
    reach = {
        tuple(row.tolist()) for row in torch.stack([targets((t,) * count)[-1] for t in range(6)])
    }
    assert len(reach) > 1  # the drafts do change the target
    values = p_values(targets, random_rows(count, 6, seed=90, sharpness=0.7), seed=count)
    assert min(values) > SIGNIFICANT


def mutant(module: types.ModuleType, *changes: tuple[str, str]) -> Any:
    """A module with its source changed."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} no longer stands in {module.__name__}"
        source = source.replace(old, new)
    changed = types.ModuleType("mutant")
    exec(compile(source, "mutant", "exec"), changed.__dict__)
    return changed


_RESIDUAL = "_residual(target[accepted], proposed[accepted])"
MUTANTS = {
    "ratio inverted": ("uniform * q >= p", "uniform * p >= q"),
    "ratio ignored": ("uniform * q >= p", "uniform >= p"),
    "always accepted": ("uniform * q >= p", "uniform * q > 2.0"),
    "never accepted": ("uniform * q >= p", "uniform * q >= 0.0"),
    "residual is the target": (_RESIDUAL, "target[accepted]"),
    "residual of another position": (_RESIDUAL, "_residual(target[accepted], proposed[0])"),
    "residual of the last position": (_RESIDUAL, "_residual(target[-1], proposed[accepted])"),
    "last token from the position before": (
        "draw(target[-1], generator)",
        "draw(target[-2], generator)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_sees_wrong_verification(name: str) -> None:
    target = random_rows(3, 16, seed=2)
    draft = related_rows(target, seed=9)
    verify = mutant(verify_module, MUTANTS[name]).verify_rejection
    assert min(p_values(always(target), draft, verify=verify)) < 1e-9


def test_the_check_sees_nothing_wrong_there_without_a_change() -> None:
    target = random_rows(3, 16, seed=2)
    assert min(p_values(always(target), related_rows(target, seed=9))) > SIGNIFICANT


@pytest.mark.parametrize("name", ["residual is the target", "always accepted", "never accepted"])
def test_the_check_sees_wrong_verification_of_drafts_without_chance(name: str) -> None:
    target = random_rows(3, 16, seed=2)
    draft = related_rows(target, seed=9)
    verify = mutant(verify_module, MUTANTS[name]).verify_rejection
    values = p_values(always(target), draft, verify=verify, by_chance=False, draws=20_000)
    assert min(values) < 1e-9


# A drafter that knows a part of the tokens, in an order of its own.


def reduced_rows(target: torch.Tensor, known: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafter's rows [K, known] that resemble the target's first K, and the tokens they are for."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = torch.randperm(target.shape[1], generator=generator)[:known]
    noise = 0.7 * torch.randn(len(target) - 1, known, generator=generator)
    return (target[:-1, vocabulary].log() + noise).softmax(-1), vocabulary


@pytest.mark.parametrize("count", [1, 3])
def test_a_reduced_vocabulary_emits_the_target(count: int) -> None:
    target = random_rows(count + 1, 12, seed=count)
    draft, vocabulary = reduced_rows(target, 7, seed=count)
    values = p_values(always(target), draft, vocabulary=vocabulary, seed=count)
    assert min(values) > SIGNIFICANT


@pytest.mark.parametrize("twice", [False, True])
def test_a_reduced_vocabulary_is_one_with_zeros_elsewhere(twice: bool) -> None:
    """Step by step, with the same luck; also where a token stands twice among the drafter's."""
    for seed in range(300):
        target = random_rows(4, 16, seed=seed)
        draft, vocabulary = reduced_rows(target, 9, seed=seed)
        if twice:
            vocabulary[3] = vocabulary[5]
        full = torch.zeros(3, 16).index_add_(1, vocabulary, draft)
        generator = torch.Generator().manual_seed(seed)
        ids = [int(vocabulary[torch.multinomial(row, 1, generator=generator)]) for row in draft]
        ends = []
        for rows, known in ((draft, vocabulary), (full, None)):
            generator.manual_seed(seed)
            ends.append((*verify_rejection(target, ids, rows, generator, known), generator))
            assert torch.equal(draft, reduced_rows(target, 9, seed=seed)[0])  # left as it was
        assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "change",
    [
        # The drafter's places taken for the target's ids.
        (
            "proposed.index_add_(1, vocabulary, draft)",
            "proposed[:, : draft.shape[1]] = draft",
        ),
        # Only the first of the drafter's distributions is used.
        (
            "proposed.index_add_(1, vocabulary, draft)",
            "proposed.index_add_(1, vocabulary, draft[:1].expand_as(draft))",
        ),
        (_RESIDUAL, "target[accepted]"),
    ],
)
def test_the_check_sees_a_reduced_vocabulary_mistaken(change: tuple[str, str]) -> None:
    target = random_rows(3, 12, seed=2)
    draft, vocabulary = reduced_rows(target, 7, seed=2)
    verify = mutant(verify_module, change).verify_rejection
    values = p_values(always(target), draft, vocabulary=vocabulary, verify=verify, draws=10_000)
    assert min(values) < 1e-9


# The model's own distributions, over the 50 most likely tokens


CONTEXTS = 20
DRAWS_OF_MANY = [2_000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def contexts(target: Target, prompts: dict[str, list[int]]) -> torch.Tensor:
    """[contexts, 50]: what follows each of the shortest prompts."""
    shortest = sorted(prompts.values(), key=len)[:CONTEXTS]
    return torch.stack([target.score(ids)[-1].topk(50).values.softmax(-1) for ids in shortest])


@pytest.mark.parametrize("draws", DRAWS_OF_MANY)
def test_rejection_sampling_emits_the_model(contexts: torch.Tensor, draws: int) -> None:
    """Steps of two drafts, from a drafter that knows 32 of the 50 tokens."""
    for index in range(CONTEXTS):
        target = contexts.roll(-index, 0)[:3]
        draft, vocabulary = reduced_rows(target, 32, seed=index)
        values = p_values(always(target), draft, vocabulary=vocabulary, draws=draws, seed=index)
        assert min(values) > SIGNIFICANT, f"context {index}"


@pytest.mark.parametrize("draws", DRAWS_OF_MANY)
def test_plain_sampling_emits_the_model(contexts: torch.Tensor, draws: int) -> None:
    """What the two ways of verification are to be like."""
    for index, target in enumerate(contexts):
        generator = torch.Generator().manual_seed(index)
        tokens = [verify_rejection(target[None], [], None, generator)[1] for _ in range(draws)]
        observed = np.bincount(tokens, minlength=50).astype(float)
        assert p_value(observed, draws * target.double().numpy()) > SIGNIFICANT


@pytest.mark.parametrize("draws", DRAWS_OF_MANY)
def test_coupled_sampling_emits_the_model(contexts: torch.Tensor, draws: int) -> None:
    """A draft for each position, raced with the noise that the target's token is raced with."""
    chunk = 1_000
    for index, target in enumerate(contexts):
        [draft], vocabulary = reduced_rows(target.expand(2, 50), 32, seed=index)
        sampler = RowSampler(SamplingParams(max_tokens=1, seed=index), [0], [], 50, CPU)
        observed, accepted = np.zeros(50), 0
        for start in range(0, draws, chunk):
            positions = range(start, start + chunk)
            drafted = pick(
                draft.log().expand(chunk, -1),
                [sampler] * chunk,
                positions,
                vocabulary,
                torch.Generator(),
            )
            assert drafted.probabilities is None
            tokens = sampler.coupled(target.expand(chunk, 50), positions)
            for place, token in zip(drafted.ids, tokens, strict=True):
                proposed = int(vocabulary[place])
                stood, last = verify_equal([token, 0], [proposed], [-1])
                observed[proposed if stood else last] += 1
                accepted += len(stood)
        assert p_value(observed, draws * target.double().numpy()) > SIGNIFICANT
        # Independent draws from the two would agree less often.
        by_luck = float((target[vocabulary] * draft).sum())
        most = float(torch.minimum(target[vocabulary], draft).sum())
        assert by_luck + 0.02 < accepted / draws < most + 0.05 or by_luck > 0.9


def test_the_check_sees_penalties_that_leave_the_drafts_out() -> None:
    """Verified against a target that does not count the drafts before each position."""
    targets = filtered_targets(2)
    sampler = RowSampler(FILTERED, [1, 2], [2, 5, 5], 6, CPU)
    logits = 2.0 * torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    blind = sampler.probabilities(logits, [])

    def verify(
        target: torch.Tensor,
        draft_ids: Sequence[int],
        draft: torch.Tensor | None,
        generator: torch.Generator,
        vocabulary: torch.Tensor | None,
    ) -> tuple[int, int]:
        return verify_rejection(blind, draft_ids, draft, generator, vocabulary)

    values = p_values(
        targets, random_rows(2, 6, seed=90, sharpness=0.7), verify=verify, draws=20_000
    )
    assert min(values) < 1e-9


# A gate that looks at what was drafted (DSpark, appendix A): with these acceptances the best number
# of drafts to verify is 2 when the first is A, and none when it is B.
A, B = 0, 1
_FIRST = torch.tensor([0.7, 0.3])
_SECOND = {A: torch.tensor([0.9, 0.1]), B: torch.tensor([1.0, 0.0])}
_DRAFTER = torch.tensor([[0.5, 0.5], [1.0, 0.0]])


def _gate_targets(drafts: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([_FIRST, _SECOND[drafts[0]], torch.tensor([0.5, 0.5])])


def test_a_draft_length_fixed_beforehand_is_lossless() -> None:
    values = p_values(_gate_targets, _DRAFTER, seed=4)
    assert min(values) > SIGNIFICANT


def test_a_draft_length_chosen_from_the_drafts_is_not() -> None:
    """0.85 and 0.15 come out in place of 0.7 and 0.3."""
    trimmed = p_values(
        _gate_targets, _DRAFTER, draft_len=lambda drawn: 2 if drawn[0] == A else 0, seed=4
    )
    assert trimmed[0] < 1e-9


def test_coupled_sampling_emits_the_target_over_positions() -> None:
    target = random_rows(1, 64, seed=3)[0]
    sampler = RowSampler(SamplingParams(max_tokens=1, seed=11), [0], [], 64, CPU)
    tokens = sampler.coupled(target.expand(DRAWS, 64), range(1000, 1000 + DRAWS))
    observed = np.bincount(tokens, minlength=64).astype(float)
    assert p_value(observed, DRAWS * target.double().numpy()) > SIGNIFICANT


def p_of_neighbours(row_sampler: type[RowSampler], draws: int) -> float:
    """How likely the tokens at two neighbouring positions are, one draw per seed."""
    first, second = random_rows(2, 6, seed=5)
    pair = torch.stack([first, second])
    joint = np.zeros((6, 6))
    for seed in range(draws):
        sampler = row_sampler(SamplingParams(max_tokens=1, seed=seed), [0], [], 6, CPU)
        one, two = sampler.coupled(pair, [40, 41])
        joint[one, two] += 1
    expected = draws * np.outer(first.double().numpy(), second.double().numpy())
    return p_value(joint, expected)


def test_coupled_sampling_emits_the_target_over_seeds_and_positions_apart() -> None:
    assert p_of_neighbours(RowSampler, 30_000) > SIGNIFICANT


def changed_by_drafts(row_sampler: type[RowSampler]) -> int:
    """With how many drafts the run of tokens over several steps is not the one without drafts."""
    rows = random_rows(12, 8, seed=6)
    sampler = row_sampler(SamplingParams(max_tokens=1, seed=5), [0], [], 8, CPU)
    alone = sampler.coupled(rows, range(12))
    changed = 0
    for drafts in itertools.product(range(8), repeat=2):
        emitted: list[int] = []
        while len(emitted) < 9:
            at = len(emitted)
            chosen = sampler.coupled(rows[at : at + 3], range(at, at + 3))
            accepted, token = verify_equal(chosen, drafts, [-1, 0])
            emitted += [*drafts[: len(accepted)], token]
        changed += emitted[:9] != alone[:9]
    return changed


def test_coupled_drafts_do_not_change_what_comes_out() -> None:
    assert changed_by_drafts(RowSampler) == 0


_KEY = "key=self._key, counter=[0, 0, 0, position]"
_NOISE = "self.noise(position)"


@pytest.mark.parametrize(
    "change",
    [
        (_KEY, "key=self._key, counter=[0, 0, 0, 0]"),
        (_KEY, "key=self._key, counter=[0, 0, 0, position // 2]"),
        (_KEY, "key=0, counter=[0, 0, 0, position]"),
        (_NOISE, "self.noise(positions[0])"),
    ],
)
def test_the_check_sees_noise_that_is_shared(change: tuple[str, str]) -> None:
    """Between positions, or between seeds."""
    assert p_of_neighbours(mutant(sampler_module, change).RowSampler, 3_000) < 1e-9


@pytest.mark.parametrize(
    "change",
    [
        # Keyed by the place in the step, or to the next number of one row of numbers.
        (_NOISE, "self.noise(position - positions[0])"),
        (_NOISE, "self.noise(2 * position - positions[0])"),
        (_NOISE, "torch.empty(8).double().exponential_(generator=self.generator)"),
    ],
)
def test_the_check_sees_noise_that_depends_on_the_drafts(change: tuple[str, str]) -> None:
    assert changed_by_drafts(mutant(sampler_module, change).RowSampler) > 0


def test_equal_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    assert verify_equal([5, 6, 7], [5, 6], [-1, 0]) == ([0, 1], 7)
    assert verify_equal([5, 6, 7], [5, 9], [-1, 0]) == ([0], 6)
    assert verify_equal([5, 6, 7], [9, 6], [-1, 0]) == ([], 5)
    assert verify_equal([5], [], []) == ([], 5)


def test_nothing_drafted_is_a_plain_draw() -> None:
    target = random_rows(1, 8, seed=1)
    generator = torch.Generator().manual_seed(0)
    tokens = [verify_rejection(target, [], None, generator) for _ in range(20_000)]
    assert {accepted for accepted, _ in tokens} == {0}
    observed = np.bincount([token for _, token in tokens], minlength=8).astype(float)
    assert p_value(observed, 20_000 * target[0].double().numpy()) > SIGNIFICANT


@pytest.mark.parametrize("vocab", [2, 8])
def test_a_drafter_equal_to_the_target_is_always_accepted(vocab: int) -> None:
    target = random_rows(5, vocab, seed=1)
    generator = torch.Generator().manual_seed(0)
    for drafts in itertools.islice(itertools.product(range(vocab), repeat=4), 500):
        assert verify_rejection(target, drafts, target[:-1], generator)[0] == 4


def test_a_draft_that_the_filters_removed_is_never_accepted() -> None:
    target = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    generator = torch.Generator().manual_seed(0)
    for draft in (None, torch.tensor([[0.9, 0.1, 0.0]])):
        for _ in range(200):
            assert verify_rejection(target, [0], draft, generator) == (0, 1)
