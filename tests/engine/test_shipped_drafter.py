"""The drafter in `drafters/`, on the packaged model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from draftgate.contract import DraftSource
from draftgate.engine import Target, load_target
from draftgate.engine.drafters import EagleDrafter, EagleHead
from draftgate.text import Message, Tokenizer
from tests.conftest import DRAFTER_DIR
from tests.support.engine import Stream, greedy, running, use_drafter
from tests.support.speculation import PacedDrafter

HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "data" / "held_out.json"
STEPS = 20


@pytest.fixture(scope="module")
def target(checkpoint_dir: Path) -> Target:
    return load_target(checkpoint_dir, torch.float32)


@pytest.fixture(scope="module")
def prompts(checkpoint_dir: Path) -> list[list[int]]:
    """Chat prompts on topics that it was not trained on."""
    tokenizer = Tokenizer.load(checkpoint_dir)
    chat = [p for p in json.loads(HELD_OUT.read_text()) if p["task"] == "chat"]
    return [tokenizer.encode_chat([Message("user", p["text"])]) for p in chat]


def length(streams: Sequence[Stream], after: int = 0) -> float:
    """Acceptance length over the first STEPS verify steps of each after so many tokens."""
    drafted = accepted = 0
    for stream in streams:
        emitted, counted = 0, 0
        for output in stream.outputs:
            emitted += len(output.token_ids)
            step = output.verify_step
            if step is not None and emitted > after + 1 and counted < STEPS:
                assert step.source is DraftSource.EAGLE
                counted += 1
                drafted += 1
                accepted += step.accepted
    return 1 + accepted / drafted


def test_it_drafts_what_the_target_says(target: Target, prompts: list[list[int]]) -> None:
    settings = {"drafter": "eagle", "drafter_dir": str(DRAFTER_DIR)}
    with running(target, draft_len=4, **settings) as engine:
        streams = [engine.submit(f"{i}", ids, greedy(60)) for i, ids in enumerate(prompts[:6])]
        for stream in streams:
            stream.wait()
    assert length(streams) > 1.7


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("off", [1, 7, 64, 500])
def test_after_any_time_without_drafts_it_is_as_good(
    target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, off: int
) -> None:
    """The same answers, once drafted for all along and once only after `off` tokens."""
    found = []
    for pause in (0, off):
        lens = [len(ids) for ids in prompts]
        drafter = PacedDrafter(
            EagleDrafter(EagleHead(DRAFTER_DIR, target), 1),
            lambda query, pause=pause, lens=lens: (
                query.count if len(query.tokens) - lens[query.row_id] > pause else 0
            ),
        )
        with monkeypatch.context() as patch:
            use_drafter(patch, drafter)
            with running(target, draft_len=4) as engine:
                streams = [
                    engine.submit(f"{i}", ids, greedy(off + 60))
                    for i, ids in enumerate(prompts[:8])
                ]
                for stream in streams:
                    stream.wait()
        found.append(streams)
    always, later = found
    assert [s.tokens for s in always] == [s.tokens for s in later]
    # The same places, reached by steps that begin at other tokens.
    assert abs(length(always, off) - length(later, off)) < 0.25
