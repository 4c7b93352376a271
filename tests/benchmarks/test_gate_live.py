"""The live benchmark of the gate measures what it says, on a tiny model behind a real Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gate_live
from common import Machine
from gate_live import CASES, CHAT, Ceiling, Level, Plan, Report
from gate_load import Part
from gate_tax import Tax

_PLAN = Plan(
    levels=(1, 3),
    rounds=2,
    answers=2,
    segment_s=0.2,
    settle_steps=3,
    tokens=(12, 9),
    ramp=(1, 2),
    ramp_rounds=1,
    false_levels=(1, 3),
    false_steps=20,
    false_rounds=2,
    tax_rows=(2,),
    tax_steps=4,
    ceiling_streams=2,
    ceiling_s=0.5,
)


def level(name: str, gate: float, k0: float, k2: float, k4: float) -> Level:
    """Always the same in three rounds of a machine that gets slower."""
    speeds = {"gate": gate, "K=0": k0, "K=2": k2, "K=4": k4}
    rounds = [{case: speed / slower for case, speed in speeds.items()} for slower in (1, 2, 3)]
    return Level(name, rounds, dict.fromkeys(CASES, 1.0))


def report(**changes: object) -> Report:
    good = Report(
        machine=Machine.this(),
        model="model",
        plan=_PLAN,
        levels=(
            level(CHAT, 140, 100, 140, 120),
            level("32 streams", 100, 100, 80, 50),
            level("32 streams, drafts too cheap", 98, 100, 80, 50),
        ),
        ceiling=Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "gate": 95.0}),
        taxes=(Tax(32, 100.0, 102.0, 0.02),),
    )
    return replace(good, **changes)  # type: ignore[arg-type]


def missed(found: Report) -> list[str]:
    return [goal.name for goal in gate_live.goals(found) if not goal.met]


def test_a_good_report_meets_every_goal() -> None:
    assert missed(report()) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"levels": (level("8 streams", 94, 50, 100, 90),)}, ["8 streams: gate / best fixed"]),
        ({"levels": (level("32 streams", 96, 100, 80, 50),)}, ["32 streams: gate / K = 0"]),
        ({"levels": (level(CHAT, 125, 100, 126, 110),)}, [f"{CHAT}: gate / K = 0"]),
        (
            {"levels": (level("8 streams, drafts too dear", 100, 99, 140, 1),)},
            ["8 streams, drafts too dear: gate / best fixed"],
        ),
        ({"taxes": (Tax(1, 100.0, 104.0, 0.04),)}, ["1 rows: K = 0 tax"]),
        (
            {"ceiling": Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "gate": 101.0})},
            ["p99 gap under a ceiling, ms"],
        ),
    ],
)
def test_a_goal_that_is_missed_is_named(changes: dict[str, object], names: list[str]) -> None:
    assert missed(report(**changes)) == names


def test_ratios_are_those_of_rounds() -> None:
    """The machine gets slower from round to round: medians of the speeds alone would mislead."""
    speeds = [{"gate": 1000, "K=0": 800}, {"gate": 550, "K=0": 440}, {"K=0": 280, "gate": 350}]
    rounds = [
        {case: Part(tokens=each.get(case, 1), seconds=1.0) for case in CASES} for each in speeds
    ]
    found = Level.of("1 streams", rounds)
    assert found.gate_over("K=0") == pytest.approx(1.25)
    # A round in which a case did not come to a whole step says nothing.
    lacking = {**rounds[0], "K=4": Part()}
    assert Level.of("1 streams", [*rounds, lacking]) == found


def test_everything_is_measured(
    spoken_model: Path, spoken_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--model-dir", str(spoken_model), "--drafter-dir", str(spoken_head)]
    gate_live.main([*folders, "--json", str(tmp_path / "found.json")], _PLAN)
    found = json.loads((tmp_path / "found.json").read_text())
    names = [each["name"] for each in found["levels"]]
    assert names == [
        *("1 streams", "3 streams", CHAT, "ramp 1 to 2 to 1"),
        *(f"{CHAT}, drafts too cheap", "3 streams, drafts too cheap"),
        *(f"{CHAT}, drafts too dear", "3 streams, drafts too dear"),
    ]
    for each in found["levels"]:
        assert each["rounds"]
        for one in each["rounds"]:
            assert set(one) == set(CASES)
            assert all(speed > 0 for speed in one.values())
        assert each["draft_lens"]["K=0"] == 0
        assert each["draft_lens"]["K=4"] > each["draft_lens"]["K=2"] > 1
    assert set(found["ceiling"]["p99_ms"]) == {"K=0", "K=4", "gate"}
    [tax] = found["taxes"]
    assert tax["plain_ms"] > 0
    assert tax["gate_ms"] > 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, gate_live.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--drafter-dir", "--json", "--quick", "--check"):
        assert option in shown
