"""Speculation changes how fast tokens come, never which: scripted drafters and the n-gram one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgate.contract import DraftSource, FinishReason
from draftgate.engine import Target
from draftgate.engine.drafters import (
    Draft,
    Drafter,
)
from tests.support.eagle import write_drafter
from tests.support.engine import ScriptedDrafter, Stream, greedy, running, use_drafter
from tests.support.speculation import (
    PROMPTS,
    SETTINGS,
    VARIED,
    PacedDrafter,
    alone,
    branching,
    model_drafter,
    oracle,
    paces,
    sometimes_right,
    unsteady,
    within,
)
from tests.support.tiny_models import BLOCK_BYTES, TINY


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_drafter_changes_a_token(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Any drafts, any K, any batch, any chunks, also with rows put back for want of blocks."""
    params = SETTINGS[setting]
    expected = alone(tiny, params)
    preemptions = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        drafter = unsteady(oracle(expected), seed)
        use_drafter(monkeypatch, drafter)
        with running(
            tiny,
            draft_len=int(random.integers(1, 9)),
            max_batch_rows=int(random.integers(1, 7)),
            prefill_chunk_tokens=int(random.integers(1, 60)),
            kv_cache_bytes=int(random.integers(8, 30)) * BLOCK_BYTES,
        ) as engine:
            assert engine.run(PROMPTS, params) == expected
            counters = engine.engine.counters()
            preemptions += counters.preemptions
        assert not drafter.rows
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert preemptions > 0


@pytest.mark.parametrize("kind", ["eagle", "hybrid"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_models_drafts_change_a_token(
    tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, kind: str
) -> None:
    """A drafter with a cache of its own, any K at each step for each row, rows put back."""
    params = SETTINGS[setting]
    expected = alone(tiny, params)
    folder = write_drafter(tmp_path / "drafter", TINY, draft_vocab=40)
    preemptions = 0
    for seed in range(4):
        random = np.random.default_rng(seed)
        most = int(random.integers(1, 9))
        answer = sometimes_right(oracle(expected), seed)
        drafter = PacedDrafter(model_drafter(kind, folder, tiny), paces(seed, most), answer)
        use_drafter(monkeypatch, drafter)
        with running(
            tiny,
            draft_len=most,
            max_batch_rows=int(random.integers(2, 7)),
            prefill_chunk_tokens=int(random.integers(1, 60)),
            kv_cache_bytes=int(random.integers(12, 30)) * BLOCK_BYTES,
        ) as engine:
            assert engine.run(PROMPTS, params) == expected
            counters = engine.engine.counters()
        preemptions += counters.preemptions
        assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert preemptions > 0


@pytest.mark.parametrize("draft_len", range(9))
def test_ngram_drafts_change_no_token(tiny: Target, draft_len: int) -> None:
    for params in (SETTINGS["greedy"], SETTINGS["seeded with penalties"]):
        with running(tiny, draft_len=draft_len, ngram_min=1) as engine:
            assert engine.run(PROMPTS, params) == alone(tiny, params)
            assert (engine.engine.counters().drafted_tokens > 0) == (draft_len > 0)


@pytest.mark.parametrize("draft_len", [1, 2, 4, 8])
def test_real_text_with_ngram_drafts(
    target: Target, prompts: dict[str, list[int]], together: dict[str, list[int]], draft_len: int
) -> None:
    """Every eighth prompt with each K."""
    names = sorted(prompts)[draft_len - 1 :: 8]
    with running(target, draft_len=draft_len) as engine:
        tokens = engine.run({name: prompts[name] for name in names}, greedy(32))
        counters = engine.engine.counters()
    assert tokens == {name: together[name][:32] for name in names}
    assert counters.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_all_real_text_with_ngram_drafts(
    target: Target, prompts: dict[str, list[int]], together: dict[str, list[int]], draft_len: int
) -> None:
    with running(target, draft_len=draft_len) as engine:
        assert engine.run(prompts, greedy(64)) == together
        assert engine.engine.counters().accepted_tokens > 100


def check_real_text(
    target: Target,
    drafter: Drafter,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    trees: bool,
) -> None:
    """Any K at each step for each row; most drafts are right, others up to somewhere."""
    answer = sometimes_right(oracle(together, prompts), seed=1, share=0.6)
    if trees:
        answer = within(branching(oracle(together, prompts), seed=1))
    use_drafter(monkeypatch, PacedDrafter(drafter, paces(1, 6), answer))
    with running(target, draft_len=6, max_batch_rows=13, prefill_chunk_tokens=61) as engine:
        assert engine.run(prompts, greedy(64)) == {name: together[name] for name in prompts}
        counters = engine.engine.counters()
    assert 0 < counters.accepted_tokens < counters.drafted_tokens


@pytest.mark.parametrize("kind", ["eagle", "hybrid", "tree"])
def test_real_text_with_a_models_drafts(
    target: Target,
    any_drafter: Path,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    names = sorted(prompts)[("eagle", "hybrid", "tree").index(kind) :: 10]
    chosen = {name: prompts[name] for name in names}
    drafter = model_drafter(kind, any_drafter, target)
    check_real_text(target, drafter, chosen, together, monkeypatch, trees=kind == "tree")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["eagle", "hybrid", "tree"])
def test_all_real_text_with_a_models_drafts(
    target: Target,
    any_drafter: Path,
    prompts: dict[str, list[int]],
    together: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    drafter = model_drafter(kind, any_drafter, target)
    check_real_text(target, drafter, prompts, together, monkeypatch, trees=kind == "tree")


def test_right_drafts_are_all_accepted_and_wrong_ones_not(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SETTINGS["greedy"]
    expected = alone(tiny, params)
    following = oracle(expected)
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft(tuple(following(query)))))
    with running(tiny, draft_len=4) as engine:
        stream = engine.one(PROMPTS["2"], params)
    assert stream.tokens == expected["2"]
    assert stream.accepted == stream.drafted
    # The first token comes with the prompt, the others five a step.
    assert [len(output.token_ids) for output in stream.outputs] == [1] + [5] * 7 + [4]
    assert {o.verify_step.source for o in stream.outputs if o.verify_step} == {DraftSource.NGRAM}

    wrong = ScriptedDrafter(lambda query: Draft(tuple((t + 1) % 96 for t in following(query))))
    use_drafter(monkeypatch, wrong)
    with running(tiny, draft_len=4) as engine:
        stream = engine.one(PROMPTS["2"], params)
    assert stream.tokens == expected["2"]
    assert (stream.accepted, len(stream.outputs)) == (0, 40)


# Runs that are cut


@pytest.fixture
def right_drafts(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A drafter that is always right about prompt 2; returns what comes out."""
    expected = alone(tiny, VARIED)
    following = oracle(expected)
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft(tuple(following(query)))))
    return expected["2"]


def check_cut(stream: Stream, tokens: Sequence[int], reason: FinishReason) -> None:
    assert stream.tokens == list(tokens)
    assert stream.finish_reason is reason
    # Each step's tokens are its accepted drafts and at most one of the target's own.
    for output in stream.outputs:
        accepted = output.verify_step.accepted if output.verify_step else 0
        assert len(output.token_ids) - accepted in (0, 1)


@pytest.mark.parametrize("count", range(1, 20))
def test_max_tokens_cuts_the_run(tiny: Target, right_drafts: list[int], count: int) -> None:
    with running(tiny, draft_len=8) as engine:
        stream = engine.one(PROMPTS["2"], replace(VARIED, max_tokens=count))
        assert engine.engine.counters().accepted_tokens == stream.accepted
    check_cut(stream, right_drafts[:count], FinishReason.LENGTH)
    assert stream.drafted == stream.accepted  # none that could not have been emitted


@pytest.mark.parametrize("count", range(1, 20))
def test_the_longest_sequence_cuts_the_run(
    tiny: Target, right_drafts: list[int], count: int
) -> None:
    longest = len(PROMPTS["2"]) + count
    with running(tiny, draft_len=8, max_sequence_tokens=longest) as engine:
        stream = engine.one(PROMPTS["2"], VARIED)
    check_cut(stream, right_drafts[:count], FinishReason.LENGTH)
    assert stream.drafted == stream.accepted  # none that could not have been emitted


@pytest.mark.parametrize("kind", ["stop", "eos", "both"])
def test_an_ending_token_cuts_the_run(tiny: Target, right_drafts: list[int], kind: str) -> None:
    """Wherever in a run of nine it falls; nothing after it is emitted or counted."""
    cut_at_draft = 0
    for at, token in enumerate(right_drafts):
        if token in right_drafts[:at]:
            continue
        target = copy.copy(tiny)
        target.config = replace(tiny.config, eos_token_ids=(token,) if kind != "stop" else ())
        stops = (token,) if kind != "eos" else ()
        params = replace(VARIED, ignore_eos=False, stop_token_ids=stops)
        with running(target, draft_len=8) as engine:
            stream = engine.one(PROMPTS["2"], params)
            counters = engine.engine.counters()
        reason = FinishReason.EOS if kind == "eos" else FinishReason.STOP_TOKEN
        check_cut(stream, right_drafts[: at + 1], reason)
        assert counters.accepted_tokens == stream.accepted
        assert counters.emitted_tokens == at + 1
        last = stream.outputs[-1]
        if last.verify_step is not None and last.verify_step.accepted == len(last.token_ids):
            cut_at_draft += 1
            assert len(last.verify_step.draft_ids) >= last.verify_step.accepted
    assert cut_at_draft > 3


def test_ignored_end_of_sequence_is_a_token_like_any_other(
    tiny: Target, right_drafts: list[int]
) -> None:
    target = copy.copy(tiny)
    target.config = replace(tiny.config, eos_token_ids=(right_drafts[3],))
    with running(target, draft_len=8) as engine:
        assert engine.one(PROMPTS["2"], VARIED).tokens == right_drafts
        stream = engine.one(PROMPTS["2"], replace(VARIED, stop_token_ids=(right_drafts[3],)))
    assert stream.finish_reason is FinishReason.STOP_TOKEN


@pytest.mark.parametrize("cap", [0, 1, 3, 5, 2**31 - 1])
def test_a_request_caps_its_drafts(tiny: Target, right_drafts: list[int], cap: int) -> None:
    with running(tiny, draft_len=5) as engine:
        stream = engine.one(PROMPTS["2"], replace(VARIED, max_draft_len=cap))
        other = engine.one(PROMPTS["2"], VARIED)
    assert stream.tokens == other.tokens == right_drafts
    longest = max(
        (len(o.verify_step.draft_ids) for o in stream.outputs if o.verify_step), default=0
    )
    assert longest == min(cap, 5)


# Resuming


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft_len", [0, 4])
def test_a_resumed_generation_goes_on_as_if_undisturbed(
    tiny: Target, setting: str, draft_len: int
) -> None:
    params = SETTINGS[setting]
    expected = alone(tiny, params)["3"]
    with running(tiny, draft_len=draft_len, ngram_min=1) as engine:
        for emitted in (1, 2, 17, 39):
            ids = (*PROMPTS["3"], *expected[:emitted])
            stream = engine.one(ids, params, resume_len=emitted)
            assert stream.tokens == expected[emitted:]
            assert stream.finish_reason is FinishReason.LENGTH
            assert stream.outputs[0].prompt_len == len(PROMPTS["3"])


def test_what_is_resumed_counts_as_output(tiny: Target) -> None:
    """Presence and frequency look at the output alone: as part of the prompt it would not count."""
    params = greedy(40, frequency_penalty=2.0, presence_penalty=2.0)
    with running(tiny, drafter="none") as engine:
        expected = engine.one(PROMPTS["3"], params).tokens
        ids = (*PROMPTS["3"], *expected[:20])
        assert engine.one(ids, params, resume_len=20).tokens == expected[20:]
        assert engine.one(ids, replace(params, max_tokens=20)).tokens != expected[20:]


# Log-probabilities


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("asked", [0, 1, 7, 20])
def test_logprobs_are_the_targets_own(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, setting: str, asked: int
) -> None:
    """Before temperature, penalties and filters, for drafted tokens like any other."""
    expected = alone(tiny, SETTINGS[setting])
    use_drafter(monkeypatch, unsteady(oracle(expected), seed=asked))
    with running(tiny, draft_len=5) as engine:
        stream = engine.one(PROMPTS["4"], replace(SETTINGS[setting], logprobs=asked))
    assert stream.tokens == expected["4"]
    assert stream.accepted > 0
    whole = [*PROMPTS["4"], *stream.tokens]
    wanted = tiny.score(whole).log_softmax(-1)[len(PROMPTS["4"]) - 1 : -1]
    chosen = wanted.gather(1, torch.tensor(stream.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(stream.logprobs), chosen, rtol=1e-4, atol=1e-4)
    ids = [row for output in stream.outputs for row in output.top_ids]
    values = [row for output in stream.outputs for row in output.top_logprobs]
    assert [len(row) for row in ids] == [asked] * 40
    top = wanted.topk(max(asked, 1), -1)
    assert [list(row) for row in ids] == top.indices[:, :asked].tolist()
    torch.testing.assert_close(torch.tensor(values), top.values[:, :asked], rtol=1e-4, atol=1e-4)
