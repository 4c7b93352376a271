"""What every drafter with a model of its own is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgate.contract import FinishReason
from draftgate.engine import EngineConfig, Output, Target
from draftgate.engine.drafters import Drafter, DraftQuery, make_drafter
from draftgate.engine.sampler import RowSampler
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams, Verification
from tests.support.chi_square import p_value
from tests.support.engine import Running, Stream, greedy, running, sampled

PROMPTS = {f"{n}": tuple((11 * i * i + n * i + n) % 96 for i in range(5 + 7 * n)) for n in range(6)}

SETTINGS: dict[str, SamplingParams] = {
    "greedy": greedy(40),
    "greedy with penalties": greedy(40, repetition_penalty=1.3, frequency_penalty=0.4),
    "seeded": sampled(40, seed=7, temperature=1.4),
    "seeded with filters": sampled(40, seed=2**64 - 1, temperature=1.2, top_k=30, top_p=0.9),
}
"""Those whose tokens do not depend on what is drafted."""


def made(name: str, folder: Path, target: Target) -> Drafter:
    """The drafter of this name."""
    drafter = make_drafter(EngineConfig(drafter=name, drafter_dir=str(folder)), target)
    assert drafter is not None
    return drafter


def refusal(name: str, folder: Path, target: Target) -> str:
    """Why it does not come to be."""
    with pytest.raises(DraftgateError) as caught:
        made(name, folder, target)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    return str(caught.value)


def query(
    tokens: list[int],
    count: int,
    *,
    row_id: int = 0,
    slot: int = 0,
    params: SamplingParams | None = None,
    vocab_size: int = 96,
) -> DraftQuery:
    sampler = RowSampler(params or greedy(1000), tokens, [], vocab_size, torch.device("cpu"))
    return DraftQuery(row_id=row_id, slot=slot, tokens=tokens, count=count, sampler=sampler)


def check_lossless(
    target: Target, drafter: str, folder: Path, block_bytes: int, params: SamplingParams
) -> None:
    """The tokens of a run without speculation come out of any batch, with drafts of any lengths,
    rows that join, are cancelled half-way, or put back for want of blocks."""
    with running(target, drafter="none", max_batch_rows=1) as engine:
        expected = {name: engine.one(ids, params).tokens for name, ids in PROMPTS.items()}
    preemptions = drafted = accepted = 0
    for seed in range(8):
        random = np.random.default_rng(seed)
        with running(
            target,
            drafter=drafter,
            drafter_dir=str(folder),
            draft_len=int(random.integers(1, 9)),
            max_batch_rows=int(random.integers(2, 9)),
            prefill_chunk_tokens=int(random.integers(1, 60)),
            kv_cache_bytes=int(random.integers(9, 30)) * block_bytes,
        ) as engine:
            kept = _submit(engine, params, random)
            for name, stream in kept.items():
                assert stream.wait().tokens == expected[name]
            counters = engine.engine.counters()
        preemptions += counters.preemptions
        drafted += counters.drafted_tokens
        accepted += counters.accepted_tokens
    assert preemptions > 0
    assert 0 < accepted < drafted


def _submit(
    engine: Running, params: SamplingParams, random: np.random.Generator
) -> Mapping[str, Stream]:
    """Every prompt, with caps of its own, among others that are cancelled after a while."""

    def cancel(stream: Stream, output: Output) -> None:
        if len(stream.tokens) > 7 and output.finish_reason is FinishReason.NONE:
            engine.engine.stop(stream.request.request_id)

    kept = {}
    for name, ids in PROMPTS.items():
        cap = [None, 0, 1, 3, 7][random.integers(5)]
        engine.submit(f"cancelled {name}", ids[::-1], params, on_output=cancel)
        kept[name] = engine.submit(name, ids, replace(params, max_draft_len=cap))
    return kept


CHANCES = [
    {},
    {"verification": Verification.REJECTION, "seed": 0},
    {"verification": Verification.COUPLED},
    {"verification": Verification.COUPLED, "seed": 0},
]
"""Every way of drawing; with a seed each request has another."""


def check_distribution(
    target: Target, drafter: str, folder: Path, settings: Mapping[str, object]
) -> None:
    """The first three tokens of a target with six, of which the last two may be drafted,
    against the exact product of the target's probabilities."""
    vocab, draws, prompt = target.config.shape.vocab_size, 3_000, (1, 2, 3)
    params = sampled(4, temperature=2.0, top_k=5, frequency_penalty=0.5, **settings)
    seen = np.zeros((vocab,) * 3)
    with running(
        target,
        drafter=drafter,
        drafter_dir=str(folder),
        draft_len=2,
        max_batch_rows=128,
        max_waiting=1 << 16,
    ) as engine:
        streams = [
            engine.submit(f"{i}", prompt, replace(params, seed=i) if "seed" in settings else params)
            for i in range(draws)
        ]
        for stream in streams:
            seen[tuple(stream.wait().tokens[:3])] += 1
        counters = engine.engine.counters()
    assert draws / 20 < counters.accepted_tokens < counters.drafted_tokens

    assert p_value(seen, draws * three_tokens(target, prompt, params)) > 1e-4


def three_tokens(target: Target, prompt: Sequence[int], params: SamplingParams) -> np.ndarray:
    """The exact probabilities [vocab, vocab, vocab] of the first three tokens, for a target with
    six and parameters with a temperature, a frequency penalty and top_k = 5."""
    vocab = target.config.shape.vocab_size
    assert (vocab, params.top_k) == (6, 5)

    def distribution(*emitted: int) -> np.ndarray:
        logits = target.score([*prompt, *emitted])[-1].double().numpy()
        counts = np.bincount(np.array(emitted, dtype=int), minlength=vocab)
        scaled = (logits - params.frequency_penalty * counts) / params.temperature
        p = np.exp(scaled - scaled.max())
        p[p.argmin()] = 0.0
        return p / p.sum()

    found = np.zeros((vocab,) * 3)
    for first in range(vocab):
        for second in range(vocab):
            share = distribution()[first] * distribution(first)[second]
            found[first, second] = share * distribution(first, second)
    return found
