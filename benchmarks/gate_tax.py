"""What a gate that never drafts costs, against an engine without a drafter."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from draftgate.engine import Engine, EngineConfig, Output, Request
from draftgate.sampling import SamplingParams
from draftgate.speculation import CostCurve, CostTable, Policy

__all__ = ["Tax", "measure_tax"]

_WARM_UP_STEPS = 10
_PROMPT_TOKENS = 40


@dataclass(frozen=True)
class Tax:
    """Of steps that decode so many rows."""

    rows: int
    plain_ms: float
    """A step of an engine without a drafter."""
    gate_ms: float
    """One of an engine whose gate decides and can decide on nothing but no drafts."""
    share: float
    """How much longer the second takes: the median over pairs of steps."""


def measure_tax(model_dir: Path, drafter_dir: Path, rows: int, steps: int) -> Tax:
    """Two engines in this process take steps in turn, on this thread."""
    plain = Engine.load(model_dir, EngineConfig(drafter="none", max_batch_rows=rows))
    config = EngineConfig(
        drafter="hybrid",
        drafter_dir=str(drafter_dir),
        draft_len=4,
        max_batch_rows=rows,
        gate="fixed",
    )
    gated = Engine.load(model_dir, config)
    # Whatever steps cost, there is nothing but no drafts to decide on: no need to measure it.
    gated.use_costs(CostTable({k: CostCurve((1,), (1.0,)) for k in gated.gate.draft_lens}))
    gated.set_policy(Policy(max_draft_len=0))
    for engine in (plain, gated):
        _fill(engine, rows, steps + 2 * _WARM_UP_STEPS)
    pairs = []
    for number in range(_WARM_UP_STEPS + steps):
        order = (plain, gated) if number % 2 else (gated, plain)
        took_ms = {engine: _step_ms(engine) for engine in order}
        pairs.append((took_ms[plain], took_ms[gated]))
    pairs = pairs[_WARM_UP_STEPS:]
    return Tax(
        rows=rows,
        plain_ms=statistics.median(before for before, _ in pairs),
        gate_ms=statistics.median(after for _, after in pairs),
        share=statistics.median(after / before for before, after in pairs) - 1,
    )


def _fill(engine: Engine, rows: int, tokens: int) -> None:
    """Rows that decode, and go on for so many tokens."""
    begun = set()

    def took(output: Output) -> None:
        begun.add(output.request_id)

    vocab = engine.target.config.shape.vocab_size
    params = SamplingParams(max_tokens=tokens + rows, temperature=0.0, ignore_eos=True)
    for row in range(rows):
        ids = tuple((7919 * (place + 31 * row) + 11) % vocab for place in range(_PROMPT_TOKENS))
        engine.submit(Request(f"tax {row}", ids, params), took)
    while len(begun) < rows:
        engine.step()


def _step_ms(engine: Engine) -> float:
    begun_s = time.perf_counter()
    engine.step()
    return 1e3 * (time.perf_counter() - begun_s)
