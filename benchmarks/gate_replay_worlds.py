"""The worlds that `gate_replay.py` runs laws through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from draftgate.speculation import CostCurve, CostTable, Gate
from draftgate.speculation.grids import find_costs
from draftgate.speculation.laws import (
    AutoLaw,
    EmaLaw,
    FixedLaw,
    GoodputLaw,
    Law,
    TableLaw,
)
from draftgate.speculation.world import Kind, Phase, Requests, World

__all__ = ["CASES", "GRIDS", "REQUESTS", "ROWS", "laws", "steady_world", "world"]

ROWS = (2, 8, 24, 60, 120, 240, 120, 60, 24, 1)
"""Of the ten phases."""

CASES = ("right", "dearer", "halved", "long")
"""The profile is right; verification is really 1.6 times as dear above 128 tokens; acceptance
halves half-way; contexts are long."""

REQUESTS = Requests(
    [
        Kind(0.3, (0.85, 0.75, 0.66, 0.58, 0.50)),
        Kind(0.4, (0.70, 0.55, 0.45, 0.40, 0.40)),
        Kind(0.3, (0.49, 0.35, 0.30, 0.30, 0.30)),
    ],
    output_tokens=160,
)
"""Together they accept what EAGLE was measured to on MT-Bench (0.68, 0.40, 0.21, 0.11, 0.05 by
place, vLLM's pull request 32374), and differ as requests do there: with drafts of 5 tokens a step
emits 1.7, 2.4 or 3.3 (SpecDecode-Bench: 1.95 to 3.16 from the tenth to the ninetieth percentile of
ShareGPT)."""

_LONG_CONTEXT = 6000
_FEW_ROWS, _LONGER = 8, 5
_CHUNK_EVERY, _CHUNK_TOKENS = 7, 128
_JITTER = 0.02
_OUTPUT_MEAN = 80
"""How many tokens a row has emitted, on average over its life."""


def _with_cliff() -> CostTable:
    """A pass takes a leap behind 256 tokens, where captured graphs might end."""
    tokens = (1, 256, 257, 2048)

    def step_ms(draft_len: int, count: int) -> float:
        return 8 + 0.012 * count + 0.9 * draft_len + (14 if count > 256 else 0)

    return CostTable(
        {
            k: CostCurve(tokens, tuple(step_ms(k, t) for t in tokens), 0.039 + 0.0024 * k)
            for k in (0, 1, 2, 3, 5, 7)
        },
        source="a cliff at 256 tokens",
    )


GRIDS: Mapping[str, Callable[[], CostTable]] = {
    "published": lambda: find_costs("llama-3.1-8b-h100"),
    "cliff": _with_cliff,
}


def world(grid: str, case: str, plain_steps: int) -> World:
    """Ten phases, each as long as so many steps without drafts take; those of few rows longer, that
    chance weighs no more in them."""
    costs = GRIDS[grid]()
    context = _LONG_CONTEXT if case == "long" else 0
    found = World(
        costs,
        REQUESTS,
        [
            Phase(
                rows,
                _steps(rows, plain_steps) * costs.step_ms(0, rows, rows * context) / 1e3,
                context_tokens=context,
                prefill_every=_CHUNK_EVERY,
                prefill_tokens=_CHUNK_TOKENS,
            )
            for rows in ROWS
        ],
        jitter=_JITTER,
    )
    if case == "dearer":
        return replace(found, cost_factor=lambda tokens: 1.6 if tokens > 128 else 1.0)
    if case == "halved":
        return replace(found, requests_later=REQUESTS.halved())
    return found


def _steps(rows: int, plain_steps: int) -> int:
    return plain_steps * (_LONGER if rows <= _FEW_ROWS else 1)


def steady_world(grid: str, phase: Phase, plain_steps: int, requests: Requests) -> World:
    """One phase, with a right profile. phase: its duration is set here."""
    costs = GRIDS[grid]()
    duration_s = plain_steps * costs.step_ms(0, phase.rows) / 1e3
    return World(costs, requests, [replace(phase, duration_s=duration_s)], jitter=_JITTER)


def laws(true: World) -> Mapping[str, Callable[[], Law]]:
    """All laws in the comparison, each with what it would know beforehand: the profile, and, where
    it is tuned, the acceptance and the context at the start."""
    costs, context = true.costs, true.phases[0].context_tokens + _OUTPUT_MEAN
    lens = costs.draft_lens
    survival = true.requests.survival(lens[-1])
    return {
        "auto": lambda: AutoLaw(Gate(lens, costs)),
        **{f"fixed:{k}": (lambda k=k: FixedLaw(k)) for k in lens},  # type: ignore[misc]
        "table": lambda: TableLaw(_tuned(costs, survival, context)),
        "ema": lambda: EmaLaw(lens),
        "goodput": lambda: GoodputLaw(costs, lens),
    }


def _tuned(costs: CostTable, survival: list[float], context: int) -> dict[int, int]:
    """The best draft length for every batch size, if all is as it was at the start."""

    def speed(rows: int, draft_len: int) -> float:
        step_ms = costs.step_ms(draft_len, rows * (draft_len + 1), rows * context)
        return (1 + sum(survival[:draft_len])) / step_ms

    return {
        rows: max(costs.draft_lens, key=lambda k, rows=rows: (speed(rows, k), -k))  # type: ignore[misc]
        for rows in range(1, max(ROWS) + 1)
    }
