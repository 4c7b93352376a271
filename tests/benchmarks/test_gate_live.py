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
from gate_live import FIXED, GATES, Ceiling, Level, Plan, Report

_PLAN = Plan(
    levels=(1, 3),
    rounds=2,
    jobs_a_stream=1,
    least_jobs=2,
    tokens=(12, 9),
    ramp=(1, 2),
    ramp_rounds=1,
    ramp_s=0.2,
    false_levels=(3,),
    false_steps=20,
    tax_levels=(3,),
    ceiling_streams=2,
    ceiling_s=0.5,
)


def level(name: str, **speeds: float) -> Level:
    """K=2 is k2 here, and so on; always the same in three rounds of a machine that gets slower."""
    cases = {case.replace("k", "K="): speed for case, speed in speeds.items()}
    rounds = [{case: speed / slower for case, speed in cases.items()} for slower in (1, 2, 3)]
    return Level(name, rounds, dict.fromkeys(cases, 1.0))


def report(**changes: object) -> Report:
    cheap = {"too cheap": 98, "too dear": 99, "never": 99, "no drafter": 101}
    good = Report(
        machine=Machine.this(),
        model="model",
        plan=_PLAN,
        levels=(
            level(gate_live.CHAT, auto=140, k0=100, k2=140, k4=120),
            level("32 streams", auto=100, k0=100, k2=80, k4=50, **cheap),
        ),
        ceiling=Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "auto": 95.0}),
    )
    return replace(good, **changes)  # type: ignore[arg-type]


def missed(found: Report) -> list[str]:
    return [goal.name for goal in gate_live.goals(found) if not goal.met]


def test_a_good_report_meets_every_goal() -> None:
    assert missed(report()) == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (
            {"levels": (level("8 streams", auto=94, k0=50, k2=100, k4=90),)},
            ["8 streams: gate / best fixed"],
        ),
        (
            {"levels": (level("32 streams", auto=96, k0=100, k2=80, k4=50),)},
            ["32 streams: gate / K = 0"],
        ),
        (
            {"levels": (level(gate_live.CHAT, auto=125, k0=100, k2=126, k4=110),)},
            ["1 stream, chat: gate / K = 0"],
        ),
        (
            {"levels": (level("1 streams", auto=140, k0=99, k2=140, k4=1, **{"too dear": 100}),)},
            ["1 streams, drafts too dear: gate / best fixed"],
        ),
        (
            {
                "levels": (
                    level(
                        "2 streams", auto=1, k0=1, k2=1, k4=1, **{"never": 96, "no drafter": 100}
                    ),
                )
            },
            ["2 streams: K = 0 tax"],
        ),
        (
            {"ceiling": Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "auto": 101.0})},
            ["p99 gap under a ceiling, ms"],
        ),
    ],
)
def test_a_goal_that_is_missed_is_named(changes: dict[str, object], names: list[str]) -> None:
    assert missed(report(**changes)) == names


def test_ratios_are_those_of_rounds() -> None:
    """The machine gets slower from round to round: medians of the speeds alone would mislead."""
    rounds = [{"auto": 1000, "K=0": 800}, {"auto": 550, "K=0": 440}, {"K=0": 280, "auto": 350}]
    assert Level("1 streams", rounds, {}).ratio("auto", "K=0") == pytest.approx(1.25)


def test_everything_is_measured(
    spoken_model: Path, spoken_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--model-dir", str(spoken_model), "--drafter-dir", str(spoken_head)]
    gate_live.main([*folders, "--json", str(tmp_path / "found.json")], _PLAN)
    found = json.loads((tmp_path / "found.json").read_text())
    names = [each["name"] for each in found["levels"]]
    assert names == ["1 streams", "3 streams", gate_live.CHAT, "ramp 1 to 2 to 1"]
    for each in found["levels"]:
        cases = {"auto", *FIXED}
        if each["name"] == "3 streams":
            cases |= {*GATES, "never", "no drafter"}
        for one in each["rounds"]:
            assert set(one) == cases
            assert all(speed > 0 for speed in one.values())
    assert set(found["ceiling"]["p99_ms"]) == {"K=0", "K=4", "auto"}
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, gate_live.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--drafter-dir", "--json", "--quick", "--check"):
        assert option in shown
