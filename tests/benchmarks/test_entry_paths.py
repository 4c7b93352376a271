"""The benchmark of the entries measures what it says, on a tiny model behind a real Triton."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

import entry_paths
from common import Machine
from entry_paths import Plan, Report, Round


def report(*engine: Round) -> Report:
    ensemble = Round(gateway_us=100, triton_us=300, engine_us=900, first_ms=50, gap_ms=10)
    slower = Round(gateway_us=200, triton_us=600, engine_us=1800, first_ms=100, gap_ms=20)
    rounds = {"ensemble": (ensemble, slower), "engine": engine}
    return Report(Machine.this(), "model", Plan(1, 2, 2), rounds)


GOOD = Round(gateway_us=120, triton_us=120, engine_us=900, first_ms=49, gap_ms=10)
SLOWER = Round(gateway_us=240, triton_us=240, engine_us=1800, first_ms=98, gap_ms=20)


def test_rounds_are_compared_pair_by_pair() -> None:
    found = report(GOOD, SLOWER)
    assert found.ratio(lambda r: r.way_us) == pytest.approx(0.6)
    assert found.ratio(lambda r: r.gateway_us) == pytest.approx(1.2)
    assert found.median("engine", lambda r: r.way_us) == 360
    assert all(goal.met for goal in entry_paths.goals(found))


@pytest.mark.parametrize(
    ("change", "goal"),
    [
        ({"triton_us": 300}, "CPU of the way, engine over ensemble"),
        ({"first_ms": 60}, "time to first token, likewise"),
        ({"gap_ms": 11}, "time between tokens, likewise"),
    ],
)
def test_a_goal_that_is_missed_is_named(change: dict[str, float], goal: str) -> None:
    worse = replace(GOOD, **change)
    doubled = replace(SLOWER, **{name: 2 * value for name, value in change.items()})
    missed = [each.name for each in entry_paths.goals(report(worse, doubled)) if not each.met]
    assert missed == [goal]


def test_the_options_say_how_much_is_run() -> None:
    assert entry_paths.plan(argparse.Namespace(quick=True, streams=None)) == Plan(8, 24, 3)
    assert entry_paths.plan(argparse.Namespace(quick=False, streams=2)) == Plan(2, 64, 5)


@pytest.mark.triton
async def test_both_entries_are_measured(
    spoken_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await entry_paths.measure(spoken_model, Plan(streams=3, tokens=40, rounds=2))
    assert {entry: len(rounds) for entry, rounds in found.entries.items()} == {
        "ensemble": 2,
        "engine": 2,
    }
    for rounds in found.entries.values():
        for each in rounds:
            assert each.engine_us > 0
            assert min(each.first_ms, each.gap_ms) > 0
    entry_paths.show(found)
    assert "ratio" in capsys.readouterr().out
