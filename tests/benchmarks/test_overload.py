"""The benchmark of overload measures what it says, on a gateway and a scripted Triton."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import overload
from common import Machine
from overload import Phase, Plan, Report
from scripted_triton import Row, ScriptedEngine

# Slow enough that ten times as much is no load for the processor, whoever else uses it.
_PLAN = Plan(
    rows=2, step_ms=20.0, tokens=8, capacity_s=1.0, overload_s=2.0, times=10.0, settle_s=0.3
)

_CALM = Phase(
    seconds=10.0,
    arrivals=250,
    complete=250,
    refused=0,
    failed={},
    gap_p50_ms=20.0,
    gap_p99_ms=22.0,
    refusal_p50_ms=None,
    refusal_p99_ms=None,
    behind_p99_ms=1.0,
    resident_mib=[60.0] * 20,
)
_STORM = replace(
    _CALM, arrivals=2500, refused=2250, gap_p99_ms=25.0, refusal_p50_ms=3.0, refusal_p99_ms=12.0
)


def missed(**changes: object) -> list[str]:
    storm = replace(_STORM, **changes)  # type: ignore[arg-type]
    report = Report(Machine.this(), _PLAN, _CALM, storm)
    return [goal.name for goal in overload.goals(report) if not goal.met]


def test_a_good_report_meets_every_goal() -> None:
    assert missed() == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"refusal_p99_ms": 26.0}, "refusals, p99, ms"),
        # Ten times the load, and nobody was refused: nothing was measured.
        ({"refusal_p99_ms": None}, "refusals, p99, ms"),
        ({"gap_p99_ms": 28.0}, "p99 gap of admitted streams, overload / capacity"),
        (
            {"resident_mib": [60.0 + step for step in range(20)]},
            "gateway memory, last / second fifth",
        ),
        ({"failed": {"INTERNAL": 1}}, "calls that failed in another way"),
    ],
)
def test_a_goal_that_is_missed_is_named(changes: dict[str, object], name: str) -> None:
    assert missed(**changes) == [name]


def test_memory_that_is_taken_at_the_start_alone_is_flat() -> None:
    assert missed(resident_mib=[40.0, 50.0, 58.0, 59.0, *[60.0] * 16]) == []


async def test_the_scripted_engine_has_so_many_rows_and_no_more() -> None:
    engine = ScriptedEngine(rows=2, step_s=1.0)
    rows = [Row(tokens=3) for _ in range(3)]
    for row in rows:
        engine.enter(row)
    engine.step()
    engine.step()
    assert [row.due for row in rows] == [2, 2, 0]
    rows[0].cut()
    engine.leave(rows[0])
    engine.step()
    assert [row.due for row in rows] == [2, 3, 1]
    engine.step()
    # Those that are complete have left by themselves.
    assert [row.due for row in rows] == [2, 3, 2]


async def test_the_scripted_engine_keeps_its_pace() -> None:
    engine = ScriptedEngine(rows=1, step_s=0.001)
    row = Row(tokens=20)
    engine.enter(row)
    running = asyncio.create_task(engine.run())
    while row.due < row.tokens:
        await row.changed.wait()
        row.changed.clear()
    running.cancel()


def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overload.main(["--json", str(tmp_path / "found.json")], _PLAN)
    found = json.loads((tmp_path / "found.json").read_text())
    calm, storm = found["capacity"], found["overload"]
    assert calm["complete"] > 0
    assert calm["refused"] == 0
    assert storm["complete"] > 0
    assert storm["refused"] > storm["complete"]
    assert calm["failed"] == storm["failed"] == {}
    assert storm["refusal_p99_ms"] >= storm["refusal_p50_ms"] > 0
    for phase in (calm, storm):
        assert phase["gap_p99_ms"] >= phase["gap_p50_ms"] > 0
        assert all(size > 0 for size in phase["resident_mib"])
    assert "overload" in capsys.readouterr().out


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, overload.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--json", "--quick", "--check"):
        assert option in shown
