"""Measuring what steps cost, on real steps of a tiny engine; times come from a clock of our own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftgate.engine import Engine, EngineConfig, Target
from draftgate.engine import known_costs as costs_module
from draftgate.engine.cost_profile import measure_costs
from draftgate.engine.known_costs import costs_file
from draftgate.errors import DraftgateError
from draftgate.speculation import CostTable
from tests.support.eagle import write_drafter
from tests.support.engine import greedy, running
from tests.support.speculation import PROMPTS
from tests.support.tiny_models import TINY, write_checkpoint


def by_work(engine: Engine) -> Callable[[], float]:
    """A clock by which a step takes 10 ms and 1 ms more for each token in its pass."""
    forward = engine.target.forward
    now_s = 0.0

    def counted(token_ids, *rest, **more):  # type: ignore[no-untyped-def]
        nonlocal now_s
        now_s += 0.010 + 0.001 * len(token_ids)
        return forward(token_ids, *rest, **more)

    engine.target.forward = counted  # type: ignore[method-assign]
    return lambda: now_s


@pytest.fixture
def own(tiny: Target) -> Target:
    """A target whose passes may be counted."""
    return copy.copy(tiny)


@pytest.mark.parametrize("drafter", ["ngram", "eagle", "hybrid"])
def test_it_measures_whole_steps_by_tokens_and_draft_length(
    own: Target, tmp_path: Path, drafter: str
) -> None:
    """Whoever drafts, and whether or not it finds anything: a step of K has rows (K + 1) tokens."""
    folder = "" if drafter == "ngram" else str(write_drafter(tmp_path / "d", TINY, draft_vocab=40))
    with running(
        own, drafter=drafter, drafter_dir=folder, draft_len=4, max_batch_rows=16, started=False
    ) as engine:
        table = measure_costs(engine.engine, clock=by_work(engine.engine))
        assert engine.engine.counters().running_rows == 0
        engine.engine.start()
        assert len(engine.run(PROMPTS, greedy(8))) == len(PROMPTS)
    assert table.draft_lens == (0, 1, 2, 3, 4)
    for draft_len, curve in table.curves.items():
        assert curve.tokens == tuple(rows * (draft_len + 1) for rows in (1, 4, 12, 16))
        assert curve.kv_us == pytest.approx(0.0)
        for tokens, time_ms in zip(curve.tokens, curve.times_ms, strict=True):
            assert time_ms == pytest.approx(10 + tokens)


def test_a_short_budget_leaves_out_large_batches(own: Target) -> None:
    with running(own, drafter="ngram", draft_len=4, max_batch_rows=64, started=False) as engine:
        table = measure_costs(engine.engine, budget_s=2.0, clock=by_work(engine.engine))
    counts = {len(curve.tokens) for curve in table.curves.values()}
    assert counts == {len(table.curves[0].tokens)}
    assert 2 <= len(table.curves[0].tokens) < 5


def test_rows_that_reach_their_end_are_replaced(own: Target) -> None:
    """Where sequences may not be long, the bench's rows end under its hands."""
    with running(
        own, drafter="ngram", draft_len=8, max_batch_rows=4, max_sequence_tokens=64, started=False
    ) as engine:
        table = measure_costs(engine.engine, clock=by_work(engine.engine))
    assert table.curves[8].tokens[-1] == 4 * 9


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CostTable]:
    """What was measured; the folder of the cache is one of the test's own."""
    found: list[CostTable] = []

    def measuring(engine: Engine, budget_s: float) -> CostTable:
        found.append(measure_costs(engine, budget_s / 100))
        return found[-1]

    monkeypatch.setattr(costs_module, "measure_costs", measuring)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


CONFIG = EngineConfig(
    dtype="float32", device="cpu", kv_cache_bytes=1 << 22, draft_len=2, max_batch_rows=2
)


def test_costs_are_measured_once(tmp_path: Path, measured: list[CostTable]) -> None:
    model = write_checkpoint(tmp_path / "model", TINY)
    first = Engine.load(model, CONFIG)
    again = Engine.load(model, CONFIG)
    assert len(measured) == 1
    assert first.gate.costs == measured[0]
    assert again.gate.costs == CostTable.load(costs_file(again))
    # Another engine has others.
    Engine.load(model, replace(CONFIG, draft_len=3))
    assert len(measured) == 2
    # A file that is none is measured again, and replaced.
    costs_file(first).write_text("{")
    Engine.load(model, CONFIG)
    assert len(measured) == 3
    assert json.loads(costs_file(first).read_text())["curves"]


@pytest.mark.parametrize(
    "more", [{"gate": "fixed"}, {"draft_len": 0}, {"drafter": "none"}], ids=str
)
def test_costs_nobody_needs_are_not_measured(
    tmp_path: Path, measured: list[CostTable], more: dict[str, object]
) -> None:
    engine = Engine.load(write_checkpoint(tmp_path / "model", TINY), replace(CONFIG, **more))
    assert (measured, engine.gate.costs) == ([], None)


def test_a_table_of_ones_own(tmp_path: Path, measured: list[CostTable]) -> None:
    model, path = write_checkpoint(tmp_path / "model", TINY), tmp_path / "costs.json"
    table = Engine.load(model, CONFIG).gate.costs
    assert table is not None
    table.scaled(2.0).save(path)
    engine = Engine.load(model, replace(CONFIG, costs_file=str(path)))
    assert engine.gate.costs == CostTable.load(path)
    assert len(measured) == 1
    path.write_text('{"format": "draftgate-costs/2"}')
    with pytest.raises(DraftgateError, match=r"costs\.json: format"):
        Engine.load(model, replace(CONFIG, costs_file=str(path)))
