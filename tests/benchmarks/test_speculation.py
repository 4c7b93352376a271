"""The speculation benchmark counts what the engine did, and fails when a goal is missed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import speculation
from draftgate.engine import EngineConfig, Target, load_target
from speculation import TASKS, Bounds, Plan, Report
from tests.support.spoken import SPOKEN
from tests.support.tiny_models import BLOCK_BYTES, tiny_tensors, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

_PLAN = Plan(
    draft_lens=(0, 2),
    prompts=2,
    rows=2,
    tokens=11,
    lone_prompts=1,
    lone_tokens=7,
    batches=(1, 3),
    batch_steps=3,
    batch_rounds=2,
    cost_rounds=2,
)
_LOOSE = Bounds(
    **{bound.name: float("-inf") for bound in fields(Bounds) if bound.name != "draft_step"},
    draft_step=float("inf"),
)
_PROMPTS = {
    task: [[(7 * seed + 5 * i * i) % 256 for i in range(20)] for seed in (first, first + 10)]
    for first, task in enumerate(TASKS)
}


@pytest.fixture(scope="module")
def target(spoken_model: Path) -> Target:
    return load_target(spoken_model, torch.float32)


@pytest.fixture(scope="module")
def twin_report(target: Target, spoken_model: Path) -> Report:
    """Drafts of the target itself, every one of which stands.

    A step takes 8 tokens of prompts, so that rows begin to decode one after the other.
    """
    config = _config("draft-model", spoken_model, prefill_chunk_tokens=8)
    return speculation.measure(target, config, _PROMPTS, _PLAN)


@pytest.fixture(scope="module")
def head_report(target: Target, spoken_head: Path) -> Report:
    return speculation.measure(target, _config("hybrid", spoken_head), _PROMPTS, _PLAN)


@pytest.fixture
def run(spoken_model: Path, spoken_head: Path) -> Callable[..., int]:
    """The benchmark's `main` on the tiny model and its head."""

    def run_main(*options: str, bounds: Bounds = _LOOSE) -> int:
        folders = ["--model-dir", str(spoken_model), "--drafter-dir", str(spoken_head)]
        return speculation.main([*folders, *options], bounds, _PLAN)

    return run_main


def _config(drafter: str, folder: Path, **settings: int) -> EngineConfig:
    settings = {"kv_cache_bytes": 1 << 24, **settings}
    return EngineConfig(drafter=drafter, drafter_dir=str(folder), **settings)


def test_help_names_every_option() -> None:
    shown = subprocess.run(
        [sys.executable, speculation.__file__, "--help"], check=True, capture_output=True, text=True
    ).stdout
    for option in ("--model-dir", "--drafter-dir", "--drafter", "--json", "--quick", "--check"):
        assert option in shown


def test_acceptance_of_drafts_that_all_stand(twin_report: Report) -> None:
    assert [a.task for a in twin_report.acceptance] == list(TASKS)
    for found in twin_report.acceptance:
        # After the first token, two steps of 1 + 4, for two prompts at once.
        assert (found.drafter, found.rows, found.draft_len) == ("draft-model", 2, 4)
        assert found.length == 5
        assert found.positions == (1, 1, 1, 1)
        assert sum(found.sources.values()) == 4


def test_positions_are_shares_of_all_steps_that_drafted_so_far(
    target: Target, tmp_path: Path
) -> None:
    tensors = tiny_tensors(SPOKEN)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor + 0.15 * tensor.std() * noise
    cousin = write_checkpoint(tmp_path / "cousin", SPOKEN, tensors)
    plan = replace(_PLAN, tokens=120, batches=(1,), batch_rounds=1)
    report = speculation.measure(target, _config("draft-model", cousin), _PROMPTS, plan)
    for found in report.acceptance:
        assert 1 < found.length < 5
        assert list(found.positions) == sorted(found.positions, reverse=True)
        # But for the last step of an answer, each of which drafts less.
        assert sum(found.positions) == pytest.approx(found.length - 1, rel=0.1)


def test_one_stream(twin_report: Report) -> None:
    streams = twin_report.lone_streams
    assert [(s.task, s.draft_len) for s in streams] == [(t, k) for t in TASKS for k in (0, 2)]
    plain = {s.task: s for s in streams if s.draft_len == 0}
    for stream in streams:
        assert stream.acceptance_length == 1 + stream.draft_len
        per_step = stream.tokens_per_s * stream.step_ms / 1e3
        assert per_step == pytest.approx(1 + stream.draft_len)
        ratio = stream.tokens_per_s / plain[stream.task].tokens_per_s
        assert stream.speedup == pytest.approx(ratio)


def test_batches_are_timed_while_every_row_decodes(twin_report: Report) -> None:
    cells = twin_report.cells
    assert [(c.rows, c.draft_len) for c in cells] == [(1, 0), (1, 2), (3, 0), (3, 2)]
    plain = {c.rows: c for c in cells if c.draft_len == 0}
    for cell in cells:
        assert cell.steps == 6
        assert cell.acceptance_length == 1 + cell.draft_len
        assert cell.tokens_per_step == 1 + cell.draft_len
        per_step = cell.tokens_per_s * cell.step_ms / 1e3
        assert per_step == pytest.approx(cell.rows * (1 + cell.draft_len))
        assert cell.speedup == pytest.approx(cell.tokens_per_s / plain[cell.rows].tokens_per_s)


def test_a_batch_whose_rows_end_too_early_is_refused(target: Target, spoken_model: Path) -> None:
    config = _config("draft-model", spoken_model, prefill_chunk_tokens=8, max_sequence_tokens=32)
    with pytest.raises(RuntimeError, match=r"^3 rows: \d+ outputs while all of them decode, not 9"):
        speculation.measure(target, config, _PROMPTS, replace(_PLAN, batches=(3,), batch_steps=9))


def test_a_batch_that_the_cache_cannot_hold_is_refused(target: Target, spoken_model: Path) -> None:
    nine_blocks = 9 * 2 * BLOCK_BYTES  # for the target and for the drafter
    config = _config("draft-model", spoken_model, kv_cache_bytes=nine_blocks)
    with pytest.raises(RuntimeError, match=r"^3 rows: \d+ outputs while all of them decode"):
        speculation.measure(target, config, _PROMPTS, replace(_PLAN, batches=(3,), batch_steps=30))


def test_a_head_is_measured_alone_too_and_its_step_beside_a_pass(head_report: Report) -> None:
    named = [(a.drafter, a.draft_width, a.task) for a in head_report.acceptance]
    kinds = (("hybrid", 1), ("eagle", 1), ("hybrid", 4), ("eagle", 4))
    assert named == [(*kind, task) for kind in kinds for task in TASKS]
    for found in head_report.acceptance:
        assert 1 <= found.length <= 5
        if found.drafter == "eagle":
            assert set(found.sources) == {"eagle"}
    cost = head_report.cost
    assert cost is not None
    assert cost.share == pytest.approx(cost.draft_step.median_ms / cost.target_pass.median_ms)
    assert cost.sync_share == pytest.approx(cost.sync.median_ms / cost.target_pass.median_ms)


def test_trees_are_measured_beside_chains(head_report: Report) -> None:
    found = [(s.draft_len, s.draft_width) for s in head_report.lone_streams if s.task == "chat"]
    assert found == [(0, 1), (2, 1), (2, 4)]


def test_other_drafters_have_no_head_to_measure(twin_report: Report) -> None:
    assert twin_report.cost is None
    assert {a.drafter for a in twin_report.acceptance} == {"draft-model"}
    names = [goal.name for goal in speculation.goals(twin_report, _LOOSE)]
    assert len(names) == 6
    assert not any(name.startswith("draft step") for name in names)


@pytest.mark.parametrize("bound", [bound.name for bound in fields(Bounds)])
def test_each_bound_has_its_goal(head_report: Report, bound: str) -> None:
    assert all(goal.met for goal in speculation.goals(head_report, _LOOSE))
    unmet = {bound: float("-inf") if bound == "draft_step" else float("inf")}
    missed = [g.name for g in speculation.goals(head_report, replace(_LOOSE, **unmet)) if not g.met]
    kind, _, task = bound.partition("_")
    begun = {
        "length": f"acceptance length, {task}, K = 4",
        "speedup": f"speedup of one stream, {task}, best K = ",
        "draft": "draft step / target pass",
    }
    assert len(missed) == 1
    assert missed[0].startswith(begun[kind])


def test_goals_take_the_best_draft_length(head_report: Report) -> None:
    streams = tuple(replace(s, speedup=1 + s.draft_len) for s in head_report.lone_streams)
    found = speculation.goals(replace(head_report, lone_streams=streams), _LOOSE)
    assert ("speedup of one stream, chat, best K = 2", 3) in [(g.name, g.measured) for g in found]


def test_run_prints_one_table_and_writes_json(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("--check", "--json", str(tmp_path / "report.json")) == 0
    content = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert set(content) == {*Report.__dataclass_fields__, "goals"}
    assert all(goal["met"] for goal in content["goals"])
    lines = capsys.readouterr().out.splitlines()
    header = lines.index("task    drafter      rows  K step ms tokens/s x K=0 length")
    table = lines[header : lines.index("", header)]
    # Acceptance by drafter and task, tasks by K and as a tree, three parts of a step, batches.
    assert len(table) == 1 + (1 + 3 * 4) + (1 + 3 * 3) + (1 + 3) + (1 + 2 * 2)
    assert max(map(len, table)) <= 100


def test_check_fails_on_a_missed_goal_and_prints_it_last(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    missing = replace(_LOOSE, length_code=float("inf"))
    assert run("--check", bounds=missing) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("MISSED acceptance length, code, K = 4: ")
    assert run(bounds=missing) == 0
