"""A cost table that is wrong for steps with drafts is found out, whichever way it is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.speculation import CostTable, Gate
from draftgate.speculation.grids import find_costs
from draftgate.speculation.laws import AutoLaw, FixedLaw, Law
from draftgate.speculation.replay import replay
from draftgate.speculation.world import Kind, Phase, Requests, World

REQUESTS = Requests(
    [
        Kind(1.0, (0.35, 0.3, 0.3, 0.3)),
        Kind(1.0, (0.55, 0.55, 0.5, 0.5)),
        Kind(1.0, (0.85, 0.85, 0.85, 0.85)),
    ],
    64,
)
FOUND_OUT_STEPS = 300


@pytest.fixture(scope="module")
def true_costs() -> CostTable:
    return find_costs("smollm2-135m-two-cores")


def wrong(table: CostTable, factor: float) -> CostTable:
    """With steps that draft so much dearer than they are."""
    curves = {k: curve.scaled(factor) if k else curve for k, curve in table.curves.items()}
    return replace(table, curves=curves)


def tokens_per_s(law: Law, costs: CostTable, rows: int) -> float:
    """Once the law has had its steps to find out."""
    phase = Phase(rows, 30.0 + 2 * rows, 200, prefill_every=7, prefill_tokens=60)
    found = replay(law, World(costs, REQUESTS, [phase], jitter=0.05), seed=1).phases[0]
    tokens, seconds = found.since(found.ends_s[FOUND_OUT_STEPS])
    return tokens / seconds


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_it_costs_little_once_it_is_found_out(true_costs: CostTable, rows: int) -> None:
    best = max(tokens_per_s(FixedLaw(k), true_costs, rows) for k in true_costs.draft_lens)
    for factor in (1 / 2.5, 1 / 1.6, 1.6, 2.5):
        gate = Gate(true_costs.draft_lens, wrong(true_costs, factor))
        assert tokens_per_s(AutoLaw(gate), true_costs, rows) >= 0.95 * best, factor
