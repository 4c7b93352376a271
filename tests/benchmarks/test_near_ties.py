"""The near-tie benchmark counts where texts part, and fails when one parts at a wide gap."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import near_ties
from draftgate.engine import EngineConfig, Target, load_target
from near_ties import Bounds, Comparison, Plan, Report
from tests.support.spoken import SPOKEN
from tests.support.tiny_models import tiny_tensors, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

_PLAN = Plan(prompts=4, tokens=24, draft_len=3)
_PROMPTS = [[(7 * seed + 5 * i * i) % 256 for i in range(9)] for seed in range(_PLAN.prompts)]


@pytest.fixture(scope="module")
def exact(spoken_model: Path) -> Target:
    return load_target(spoken_model, torch.float32)


@pytest.fixture
def run(spoken_model: Path, spoken_head: Path) -> Callable[..., int]:
    """The benchmark's `main` on the tiny model and its head."""

    def run_main(*options: str, bounds: Bounds | None = None) -> int:
        folders = ["--model-dir", str(spoken_model), "--drafter-dir", str(spoken_head)]
        return near_ties.main([*folders, *options], bounds, _PLAN)

    return run_main


def _measure(target: Target, exact: Target, head: Path) -> Report:
    config = EngineConfig(drafter="hybrid", drafter_dir=str(head), kv_cache_bytes=1 << 24)
    return near_ties.measure(target, exact, config, _PROMPTS, _PLAN)


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, near_ties.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--drafter-dir", "--json", "--quick", "--check"):
        assert option in shown


def test_in_fp32_no_text_parts(exact: Target, spoken_head: Path) -> None:
    report = _measure(exact, exact, spoken_head)
    assert report.comparisons == (
        Comparison("drafts of 3", 4, 0, 4 * 24, ()),
        Comparison("one batch of all", 4, 0, 4 * 24, ()),
    )
    assert [goal.measured for goal in near_ties.goals(report, Bounds())] == [0, 0]


def test_gaps_are_those_of_the_exact_model_where_texts_part(
    exact: Target, spoken_head: Path, tmp_path: Path
) -> None:
    # All tokens come in pairs with the same embedding, and so with logits that are equal but for
    # the order of summation: the exact model, in which they differ, tells how far texts part.
    tensors = tiny_tensors(SPOKEN)
    embedding = tensors["model.embed_tokens.weight"]
    noise = torch.randn(embedding[1::2].shape, generator=torch.Generator().manual_seed(1))
    embedding[1::2] = embedding[::2] + 2e-3 * noise
    paired = write_checkpoint(tmp_path / "paired", SPOKEN, tensors)
    targets = [load_target(paired, dtype) for dtype in (torch.bfloat16, torch.float32)]
    report = _measure(targets[0], targets[1], spoken_head)
    for found in report.comparisons:
        assert found.answers == 4
        assert found.changed == len(found.gaps) <= 4
        assert found.changed < found.tokens <= 4 * 24
        assert list(found.gaps) == sorted(found.gaps)
        assert all(0 <= gap < 0.1 for gap in found.gaps)


@pytest.mark.parametrize("wide", [0, 1])
def test_a_wide_gap_misses_its_goal(exact: Target, spoken_head: Path, wide: int) -> None:
    report = _measure(exact, exact, spoken_head)
    comparisons = list(report.comparisons)
    comparisons[wide] = replace(comparisons[wide], changed=2, gaps=(0.1, 0.6))
    found = near_ties.goals(replace(report, comparisons=tuple(comparisons)), Bounds())
    assert [goal.met for goal in found] == [number != wide for number in (0, 1)]
    assert found[wide].measured == 0.6


def test_run_prints_a_table_and_writes_json(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--check", "--json", str(tmp_path / "report.json"), bounds=Bounds(gap=1e9)) == 0
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(content) == {*Report.__dataclass_fields__, "goals"}
    assert [c["name"] for c in content["comparisons"]] == ["drafts of 3", "one batch of all"]
    assert all(goal["met"] for goal in content["goals"])
    shown = capsys.readouterr().out
    assert "4 prompts, 24 greedy tokens" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 100


def test_check_fails_on_a_missed_goal(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = Bounds(gap=-1.0)
    assert run("--check", bounds=impossible) == 1
    assert "MISSED widest gap, drafts of 3: " in capsys.readouterr().out
    assert run(bounds=impossible) == 0
