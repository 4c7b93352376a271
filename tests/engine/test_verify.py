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

import numpy as np
import pytest
import torch

import draftgate.engine.verify as verify_module
from draftgate.engine.sampler import RowSampler
from draftgate.engine.verify import verify_equal, verify_rejection
from draftgate.sampling import SamplingParams
from tests.support.chi_square import p_value

DRAWS = 100_000
SIGNIFICANT = 1e-4
CPU = torch.device("cpu")

Verify = Callable[
    [torch.Tensor, Sequence[int], torch.Tensor | None, torch.Generator], tuple[int, int]
]
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
    seed: int = 0,
) -> list[float]:
    """For each position of a step with K drafts from `draft` [K, vocab], how likely what came out
    is under the target.

    by_chance: whether the verification is told q; else drafts count as proposed without chance.
    draft_len: a rule that lets only so many of these drafts be verified.
    """
    count, vocab = draft.shape
    random = np.random.default_rng(seed)
    columns = [
        random.choice(vocab, draws, p=row.double().numpy() / row.double().sum().item())
        for row in draft
    ]
    generator = torch.Generator().manual_seed(seed)
    observed = np.zeros((count + 1, vocab))
    runs: Counter[tuple[tuple[int, ...], int]] = Counter()
    for drawn in zip(*(column.tolist() for column in columns), strict=True):
        kept = drawn if draft_len is None else drawn[: draft_len(drawn)]
        q = draft[: len(kept)] if by_chance else None
        accepted, token = verify(targets(drawn)[: len(kept) + 1], kept, q, generator)
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


def mutant(*changes: tuple[str, str]) -> Verify:
    """`verify_rejection` with its source changed."""
    source = Path(str(verify_module.__file__)).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} no longer stands in verify.py"
        source = source.replace(old, new)
    module = types.ModuleType("mutant")
    exec(compile(source, "mutant", "exec"), module.__dict__)
    changed: Verify = module.verify_rejection
    return changed


_RESIDUAL = "_residual(target[accepted], ids[accepted], draft, accepted)"
MUTANTS = {
    "ratio inverted": ("uniform * q >= p", "uniform * p >= q"),
    "ratio ignored": ("uniform * q >= p", "uniform >= p"),
    "always accepted": ("uniform * q >= p", "uniform * q > 2.0"),
    "never accepted": ("uniform * q >= p", "uniform * q >= 0.0"),
    "residual is the target": (_RESIDUAL, "target[accepted]"),
    "residual of another position": ("target - draft[position]", "target - draft[0]"),
    "residual of the last position": (
        _RESIDUAL,
        _RESIDUAL.replace("target[accepted]", "target[-1]"),
    ),
    "last token from the position before": (
        "draw(target[-1], generator)",
        "draw(target[-2], generator)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_sees_wrong_verification(name: str) -> None:
    target = random_rows(3, 16, seed=2)
    draft = related_rows(target, seed=9)
    assert min(p_values(always(target), draft, draws=20_000)) > SIGNIFICANT
    verify = mutant(MUTANTS[name])
    assert min(p_values(always(target), draft, verify=verify, draws=20_000)) < 1e-9


@pytest.mark.parametrize("name", ["residual is the target", "always accepted", "never accepted"])
def test_the_check_sees_wrong_verification_of_drafts_without_chance(name: str) -> None:
    target = random_rows(3, 16, seed=2)
    draft = related_rows(target, seed=9)
    verify = mutant(MUTANTS[name])
    values = p_values(always(target), draft, verify=verify, by_chance=False, draws=20_000)
    assert min(values) < 1e-9


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
    ) -> tuple[int, int]:
        return verify_rejection(blind, draft_ids, draft, generator)

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
    tokens = sampler.coupled(target.expand(DRAWS, 64), 1000)
    observed = np.bincount(tokens, minlength=64).astype(float)
    assert p_value(observed, DRAWS * target.double().numpy()) > SIGNIFICANT


def test_coupled_sampling_emits_the_target_over_seeds_and_positions_apart() -> None:
    """The joint distribution of two neighbouring positions, one draw per seed."""
    first, second = random_rows(2, 6, seed=5)
    pair = torch.stack([first, second])
    draws = 30_000
    joint = np.zeros((6, 6))
    for seed in range(draws):
        sampler = RowSampler(SamplingParams(max_tokens=1, seed=seed), [0], [], 6, CPU)
        one, two = sampler.coupled(pair, 40)
        joint[one, two] += 1
    expected = draws * np.outer(first.double().numpy(), second.double().numpy())
    assert p_value(joint.ravel(), expected.ravel()) > SIGNIFICANT


def test_coupled_drafts_do_not_change_what_comes_out() -> None:
    """Whatever is drafted, the run of tokens over several steps is the one without drafts."""
    rows = random_rows(12, 8, seed=6)
    sampler = RowSampler(SamplingParams(max_tokens=1, seed=5), [0], [], 8, CPU)
    alone = sampler.coupled(rows, 0)
    for drafts in itertools.product(range(8), repeat=2):
        emitted: list[int] = []
        while len(emitted) < 9:
            at = len(emitted)
            accepted, token = verify_equal(sampler.coupled(rows[at : at + 3], at), drafts)
            emitted += [*drafts[:accepted], token]
        assert emitted[:9] == alone[:9]


def test_equal_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    assert verify_equal([5, 6, 7], [5, 6]) == (2, 7)
    assert verify_equal([5, 6, 7], [5, 9]) == (1, 6)
    assert verify_equal([5, 6, 7], [9, 6]) == (0, 5)
    assert verify_equal([5], []) == (0, 5)


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
