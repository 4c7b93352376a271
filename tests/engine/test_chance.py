"""What chance does to tokens, and what speculation does not do to chance, for each verification."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftgate.engine import Target, load_target
from draftgate.engine.drafters import Draft, Drafter, DraftQuery, EagleDrafter, EagleHead
from draftgate.sampling import Verification
from draftgate.speculation import CostCurve, CostTable
from tests.support.chi_square import p_value
from tests.support.drafters import three_tokens
from tests.support.eagle import write_drafter
from tests.support.engine import ScriptedDrafter, greedy, running, sampled, use_drafter
from tests.support.speculation import PROMPTS
from tests.support.tiny_models import TINY, tiny_tensors, write_checkpoint


@pytest.mark.parametrize("verification", [None, *Verification])
def test_without_a_seed_every_run_is_its_own(
    tiny: Target, verification: Verification | None
) -> None:
    params = sampled(30, temperature=1.5, verification=verification)
    with running(tiny, draft_len=4) as engine:
        streams = [engine.submit(f"{i}", PROMPTS["1"], params) for i in range(10)]
        runs = {tuple(stream.wait().tokens) for stream in streams}
        runs |= {tuple(engine.one(PROMPTS["1"], params).tokens) for _ in range(10)}
    assert len(runs) == 20


@pytest.mark.parametrize(
    ("settings", "coupled"),
    [
        ({}, False),
        ({"seed": 5}, True),
        ({"verification": Verification.REJECTION}, False),
        ({"verification": Verification.REJECTION, "seed": 5}, False),
        ({"verification": Verification.COUPLED}, True),
        ({"verification": Verification.COUPLED, "seed": 5}, True),
    ],
)
def test_a_request_chooses_its_verification(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], coupled: bool
) -> None:
    """A draft from the target's own distribution always stands under rejection; coupled, only
    where chance falls on the same token twice."""
    generator = torch.Generator().manual_seed(0)

    def rule(query: DraftQuery) -> Draft:
        p = (tiny.score(list(query.tokens))[-1:] / 1.5).softmax(-1)
        return Draft((int(torch.multinomial(p[0], 1, generator=generator)),), probabilities=p)

    use_drafter(monkeypatch, ScriptedDrafter(rule))
    with running(tiny, draft_len=1) as engine:
        stream = engine.one(PROMPTS["1"], sampled(40, temperature=1.5, **settings))
    assert stream.drafted >= 19
    assert (stream.accepted < stream.drafted / 2) == coupled
    assert (stream.accepted == stream.drafted) != coupled


def test_rejection_with_a_seed_gives_the_same_tokens_for_the_same_drafts(tiny: Target) -> None:
    """Whatever else is in the batch; not for other draft lengths, which `coupled` stands for."""

    def run(draft_len: int, seed: int) -> dict[str, list[int]]:
        params = sampled(
            40, temperature=1.1, top_k=4, seed=seed, verification=Verification.REJECTION
        )
        with running(tiny, draft_len=draft_len, ngram_min=1, max_batch_rows=batch_rows) as engine:
            tokens = engine.run(PROMPTS, params)
            assert (engine.engine.counters().drafted_tokens > 100) == (draft_len > 0)
        return tokens

    batch_rows = 8
    first, without, other_seed = run(4, 11), run(0, 11), run(4, 2**64 - 1)
    batch_rows = 1
    assert run(4, 11) == first
    assert run(0, 11) == without
    assert without != first != other_seed


@pytest.mark.parametrize("verification", Verification)
def test_greedy_has_no_use_for_a_verification(tiny: Target, verification: Verification) -> None:
    plain = greedy(40, frequency_penalty=0.4)
    with running(tiny, draft_len=4, ngram_min=1) as engine:
        chosen = replace(plain, seed=3, verification=verification)
        assert engine.run(PROMPTS, chosen) == engine.run(PROMPTS, plain)


@pytest.fixture
def six(tmp_path: Path) -> Target:
    """A target with six tokens."""
    config = TINY | {"vocab_size": 6}
    return load_target(write_checkpoint(tmp_path / "model", config), torch.float32)


@pytest.mark.parametrize("verification", Verification)
def test_a_resumed_token_does_not_depend_on_the_luck_of_the_one_before(
    six: Target, verification: Verification
) -> None:
    """Two tokens of one seed, in two runs, over many seeds: the product of the probabilities."""
    draws, prompt = 4_000, (1, 2, 3)
    params = sampled(1, temperature=4.0, verification=verification)
    seen = np.zeros((6, 6))
    with running(six, draft_len=0, max_batch_rows=128, max_waiting=1 << 16) as engine:

        def run(emitted: dict[int, list[int]]) -> dict[int, list[int]]:
            streams = {}
            for seed, tokens in emitted.items():
                streams[seed] = engine.submit(
                    f"{seed}-{len(tokens)}",
                    (*prompt, *tokens),
                    replace(params, seed=seed, max_tokens=len(tokens) + 1),
                    resume_len=len(tokens),
                )
            return {seed: [*emitted[seed], *s.wait().tokens] for seed, s in streams.items()}

        for tokens in run(run({seed: [] for seed in range(draws)})).values():
            seen[tuple(tokens)] += 1

    def distribution(*emitted: int) -> np.ndarray:
        logits = six.score([*prompt, *emitted])[-1].double()
        return (logits / 4.0).softmax(-1).numpy()

    first = distribution()
    expected = np.stack([draws * first[token] * distribution(token) for token in range(6)])
    assert p_value(seen, expected) > 1e-4


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("told", {}),
        ("untold", {}),
        ("told", {"verification": Verification.REJECTION, "seed": 0}),
        ("told", {"verification": Verification.COUPLED}),
        ("untold", {"verification": Verification.COUPLED, "seed": 0}),
        ("eagle", {}),
        ("eagle", {"verification": Verification.REJECTION, "seed": 0}),
        ("eagle", {"seed": 0}),
        ("tree", {"verification": Verification.COUPLED}),
        ("tree", {"seed": 0}),
    ],
)
def test_sampled_sequences_have_the_targets_distribution(
    six: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    settings: dict[str, Any],
) -> None:
    """The first three tokens of four through the engine, drafted by chance, against the exact
    product of the target's probabilities. With a seed every request has another. The EAGLE drafter
    knows four of the six tokens, and drafts for many rows at once."""
    vocab, draws, prompt = 6, 3_000, (1, 2, 3)
    random = np.random.default_rng(0)
    q = random.dirichlet(np.ones(vocab), size=3)

    def rule(query: DraftQuery) -> Draft:
        ids = tuple(int(random.choice(vocab, p=q[i])) for i in range(query.count))
        # Not told q, the engine takes a draft for a choice without chance: as good.
        told = torch.tensor(q[: query.count], dtype=torch.float32) if kind == "told" else None
        return Draft(ids, probabilities=told)

    drafter: Drafter = ScriptedDrafter(rule)
    if kind in ("eagle", "tree"):
        config = TINY | {"vocab_size": vocab}
        folder = write_drafter(tmp_path / "drafter", config, draft_vocab=4)
        drafter = EagleDrafter(EagleHead(folder, six), 1 if kind == "eagle" else 2)
    use_drafter(monkeypatch, drafter)
    params = sampled(4, temperature=4.0, top_k=5, frequency_penalty=0.5, **settings)
    seeds = range(draws) if "seed" in settings else [None] * draws
    seen = np.zeros((vocab,) * 3)
    with running(six, draft_len=3, max_batch_rows=128, max_waiting=1 << 16) as engine:
        streams = [
            engine.submit(f"{i}", prompt, replace(params, seed=seed))
            for i, seed in enumerate(seeds)
        ]
        for stream in streams:
            seen[tuple(stream.wait().tokens[:3])] += 1
        assert engine.engine.counters().accepted_tokens > draws / 10

    assert p_value(seen, draws * three_tokens(six, prompt, params)) > 1e-4


# A gate that looks at what was drafted, in the engine (DSpark, appendix A; test_verify has the same
# without an engine): with these acceptances the best number of drafts is 2 when the first is A, and
# none when it is B.
START, THEN, A, B = range(4)
FOLLOWS = {
    START: [0.0, 1.0, 0.0, 0.0],
    THEN: [0.0, 0.0, 0.7, 0.3],
    A: [0.0, 0.0, 0.9, 0.1],
    B: [0.0, 0.0, 1.0, 0.0],
}


@pytest.fixture
def markov(tmp_path: Path) -> Target:
    """A model whose every token has these probabilities, given the one before it."""
    hidden = 48
    config = TINY | {"vocab_size": 4, "tie_word_embeddings": False}
    tensors = tiny_tensors(config)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # the embedding goes through as it is
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["model.embed_tokens.weight"] = torch.eye(4, hidden)
    normed = (1 / hidden + TINY["rms_norm_eps"]) ** -0.5
    logits = torch.tensor([FOLLOWS[token] for token in range(4)]).log().clamp_min(-1e3)
    tensors["lm_head.weight"] = torch.zeros(4, hidden)
    tensors["lm_head.weight"][:, :4] = logits.T / normed
    target = load_target(write_checkpoint(tmp_path / "markov", config, tensors), torch.float32)
    told = target.score([START, THEN, A, B]).softmax(-1)
    torch.testing.assert_close(told, torch.tensor(list(FOLLOWS.values())), rtol=0, atol=1e-5)
    return target


def first_tokens(
    markov: Target,
    monkeypatch: pytest.MonkeyPatch,
    length: Callable[[int, int], int],
    costs: CostTable | None = None,
) -> np.ndarray:
    """How often A and B came first. `length`: how many of two drafts to verify, by the number of
    the request and by the first token drafted for it. costs: what the gate decides by, instead."""
    random = np.random.default_rng(1)
    told = torch.tensor([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 1.0, 0.0]])

    def rule(query: DraftQuery) -> Draft:
        if len(query.tokens) > 2:
            return Draft()
        drafted = (int(random.choice([A, B])), A)
        count = min(length(query.row_id, drafted[0]), query.count)
        return Draft(drafted[:count], probabilities=told[:count] if count else None)

    use_drafter(monkeypatch, ScriptedDrafter(rule))
    draws = 4_000
    params = sampled(4, verification=Verification.REJECTION)
    with running(
        markov,
        clock=lambda: 0.0,
        draft_len=2,
        max_batch_rows=128,
        max_waiting=1 << 16,
        started=False,
    ) as engine:
        if costs is not None:
            engine.engine.use_costs(costs)
        engine.engine.start()
        streams = [engine.submit(f"{i}", (START,), params) for i in range(draws)]
        came = [stream.wait().tokens for stream in streams]
        assert engine.engine.counters().drafted_tokens > draws / 2
    assert {tokens[0] for tokens in came} == {THEN}
    firsts = [tokens[1] for tokens in came]
    return np.array([firsts.count(A), firsts.count(B)], dtype=float)


def test_a_gate_that_looks_at_the_draft_is_not_lossless(
    markov: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = first_tokens(markov, monkeypatch, lambda row, drafted: 2 if drafted == A else 0)
    assert p_value(seen, seen.sum() * np.array([0.7, 0.3])) < 1e-9
    assert p_value(seen, seen.sum() * np.array([0.85, 0.15])) > 1e-4


def test_the_gate_is_lossless_where_to_look_would_pay(
    markov: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With steps a second near the paper's, 1.0, 0.5 and 0.54 for one, two and three tokens a row,
    two drafts pay if the first is A and not if it is B. The gate knows the past alone."""
    ms = {0: 1.0, 1: 1 / 0.5, 2: 1 / 0.54}
    costs = CostTable({k: CostCurve((k + 1, 128 * (k + 1)), (t, t)) for k, t in ms.items()})
    seen = first_tokens(markov, monkeypatch, lambda row, drafted: 2, costs)
    assert p_value(seen, seen.sum() * np.array([0.7, 0.3])) > 1e-4


@pytest.mark.parametrize("length", [1, 2, "by load"])
def test_a_draft_length_chosen_before_drafting_is_lossless(
    markov: Target, monkeypatch: pytest.MonkeyPatch, length: int | str
) -> None:
    def chosen(row: int, drafted: int) -> int:
        return length if isinstance(length, int) else row % 3

    seen = first_tokens(markov, monkeypatch, chosen)
    assert p_value(seen, seen.sum() * np.array([0.7, 0.3])) > 1e-4
