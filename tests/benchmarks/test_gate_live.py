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
from gate_live import CASES, Ceiling, Level, Plan, Report
from gate_load import Window

_PLAN = Plan(
    levels=(1, 3),
    rounds=2,
    settle_s=0.1,
    window_s=0.3,
    max_tokens=12,
    ramp=(1, 2),
    ramp_rounds=1,
    ramp_s=0.2,
    false_levels=(2,),
    false_steps=20,
    tax_levels=(2,),
    ceiling_streams=2,
    ceiling_s=0.5,
)


def level(name: str, auto: float, **speeds: float) -> Level:
    fixed = {f"K={case[1:]}": speed for case, speed in speeds.items()}
    return Level(
        name=name,
        tokens_per_s={"auto": auto, **fixed},
        ratios={case: auto / speed for case, speed in fixed.items()},
        mean_draft_len=1.0,
    )


def report(**changes: object) -> Report:
    good = Report(
        machine=Machine.this(),
        model="model",
        plan=_PLAN,
        levels=(
            level("1 stream, chat", 140, k0=100, k2=140, k4=120),
            level("32 streams", 100, k0=100, k2=80, k4=50),
        ),
        falsified=(level("32 streams, drafts too cheap", 98, k0=100, k2=80, k4=50),),
        tax={"32": 0.02},
        ceiling=Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "ceiling": 95.0}),
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
            {"levels": (level("8 streams", 94, k0=50, k2=100, k4=90),)},
            ["8 streams: gate / best fixed"],
        ),
        (
            {"levels": (level("32 streams", 96, k0=100, k2=80, k4=50),)},
            ["32 streams: gate / K = 0"],
        ),
        (
            {"levels": (level("1 stream, chat", 125, k0=100, k2=126, k4=110),)},
            ["1 stream, chat: gate / K = 0"],
        ),
        (
            {"falsified": (level("1 stream, drafts too dear", 100, k0=100, k2=140, k4=120),)},
            ["1 stream, drafts too dear: gate / best fixed"],
        ),
        ({"tax": {"1": 0.04}}, ["K = 0 tax, 1 streams"]),
        (
            {"ceiling": Ceiling(8, 100.0, {"K=0": 80.0, "K=4": 120.0, "ceiling": 101.0})},
            ["p99 gap under a ceiling, ms"],
        ),
    ],
)
def test_a_goal_that_is_missed_is_named(changes: dict[str, object], names: list[str]) -> None:
    assert missed(report(**changes)) == names


def test_ratios_are_those_of_rounds() -> None:
    """The machine gets slower from round to round: medians of the speeds alone would mislead."""
    rounds = [
        {case: Window(1, seconds=1.0, tokens=tokens // number) for case, tokens in speeds.items()}
        for number, speeds in enumerate(
            [{"auto": 1000, "K=0": 800}, {"auto": 1100, "K=0": 880}, {"K=0": 840, "auto": 1050}], 1
        )
    ]
    assert gate_live._level("1 streams", rounds).ratios["K=0"] == pytest.approx(1.25, rel=0.01)


def test_everything_is_measured(
    spoken_model: Path, spoken_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--model-dir", str(spoken_model), "--drafter-dir", str(spoken_head)]
    gate_live.main([*folders, "--json", str(tmp_path / "found.json")], _PLAN)
    found = json.loads((tmp_path / "found.json").read_text())
    names = [each["name"] for each in found["levels"]]
    assert names == ["1 streams", "3 streams", "1 stream, chat", "ramp 1 to 2 to 1"]
    assert [each["name"] for each in found["falsified"]] == [
        "2 streams, drafts too cheap",
        "2 streams, drafts too dear",
    ]
    for each in (*found["levels"], *found["falsified"]):
        assert set(each["tokens_per_s"]) == set(CASES)
        assert all(speed > 0 for speed in each["tokens_per_s"].values())
    assert list(found["tax"]) == ["2"]
    assert set(found["ceiling"]["p99_ms"]) == {"K=0", "K=4", "ceiling"}
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, gate_live.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--drafter-dir", "--json", "--quick", "--check"):
        assert option in shown
