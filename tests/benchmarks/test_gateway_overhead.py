"""The benchmark of the gateway's overhead measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import gateway_overhead
from common import Machine
from gateway_overhead import CASES, Plan, Report
from overhead_load import Measured

_PLAN = Plan(streams=6, rounds=1, seconds=0.6, idle_streams=12)


def found(cpu_us: float, p50_ms: float = 1.0, ttft_ms: float = 2.0) -> Measured:
    return Measured(
        messages=1000,
        cpu_us=cpu_us,
        events=1000,
        p50_ms=p50_ms,
        p99_ms=5.0,
        ttft_ms=ttft_ms,
        cores=1.0,
    )


def report(
    gateway: float = 110.0,
    coalescing: float = 55.0,
    p50_ms: float = 1.7,
    ttft_ms: float = 3.5,
    idle_stream_bytes: float | None = 100_000.0,
) -> Report:
    """Always the same in three rounds of a machine that gets slower."""
    whole = {
        "direct": found(50.0),
        "relay": found(100.0, 1.4, 2.5),
        "gateway": found(gateway, p50_ms, ttft_ms),
        "gateway, speculating": found(gateway + 20),
        "gateway, coalescing": found(coalescing, 50.0, ttft_ms),
    }
    rounds = [
        {name: replace(each, cpu_us=each.cpu_us * slower) for name, each in whole.items()}
        for slower in (1, 2, 3)
    ]
    return Report(Machine.this(), _PLAN, rounds, idle_stream_bytes)


def missed(found: Report) -> list[str]:
    return [goal.name for goal in gateway_overhead.goals(found) if not goal.met]


def test_a_good_report_meets_every_goal() -> None:
    assert missed(report()) == []
    assert len(gateway_overhead.goals(report(idle_stream_bytes=None))) == 4


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (report(gateway=116.0), "CPU of a message, gateway / relay"),
        (report(coalescing=61.0), "CPU of a message, coalescing / relay"),
        (report(p50_ms=1.9), "added p50 latency, ms"),
        (report(ttft_ms=4.1), "added TTFT, ms"),
        (report(idle_stream_bytes=151_000.0), "kB of an idle stream"),
    ],
)
def test_a_goal_that_is_missed_is_named(bad: Report, name: str) -> None:
    assert missed(bad) == [name]


def test_ratios_are_those_of_rounds() -> None:
    assert report().cpu_ratio("gateway") == pytest.approx(1.1)
    assert report().added_ms("gateway", "p50_ms") == pytest.approx(0.7)


def test_each_case_comes_first_in_turn() -> None:
    orders = [gateway_overhead._order(number) for number in range(10)]
    assert all(sorted(order) == sorted(CASES) for order in orders)
    assert {order[0] for order in orders} == set(CASES)


def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gateway_overhead.main(["--json", str(tmp_path / "found.json")], _PLAN)
    content = json.loads((tmp_path / "found.json").read_text())
    [whole] = content["rounds"]
    assert set(whole) == set(CASES)
    for each in whole.values():
        assert each["messages"] > 20
        assert each["cpu_us"] > 0
        assert 0 < each["p50_ms"] <= each["p99_ms"]
        assert each["ttft_ms"] > 0
    for name in ("direct", "relay", "gateway"):
        assert abs(whole[name]["events"] - whole[name]["messages"]) <= 1
    few = whole["gateway, coalescing"]
    assert few["events"] < few["messages"] / 2
    assert content["idle_stream_bytes"] is not None
    shown = capsys.readouterr().out
    assert all(name in shown for name in CASES)
    assert max(map(len, shown.splitlines())) <= 110


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, gateway_overhead.__file__, "--help"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for option in ("--json", "--quick", "--check"):
        assert option in shown
