"""What an operator asks of the gate while the engine runs, and what is kept of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from draftgate.contract import GateReason
from draftgate.engine import Engine, EngineConfig, Output, Target
from draftgate.engine.drafters import Draft
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation import CostCurve, CostTable, Mode, Policy
from tests.fakes.gate import STATE
from tests.support.engine import ScriptedDrafter, Stream, greedy, running, use_drafter
from tests.support.speculation import PROMPTS, alone, oracle
from tests.support.tiny_models import TINY, write_checkpoint

LONGEST = 4
PARAMS = greedy(60)

COSTS = CostTable(
    {k: CostCurve((1, 64), (10.0 + k, 20.0 + k)) for k in range(LONGEST + 1)},
    source="made up",
    measured_at_s=1.0,
)


def at_outputs(actions: dict[int, Callable[[], None]]) -> Callable[[Stream, Output], None]:
    """Do these between two steps, after the outputs of these numbers."""

    def hook(stream: Stream, output: Output) -> None:
        action = actions.get(output.chunk_index)
        if action is not None:
            action()

    return hook


def test_a_policy_holds_from_the_next_step_for_rows_that_run(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(tiny, PARAMS)
    following = oracle(expected)
    use_drafter(monkeypatch, ScriptedDrafter(lambda query: Draft(tuple(following(query)))))
    with running(tiny, draft_len=LONGEST) as engine:
        obey = engine.engine.set_policy
        hook = at_outputs(
            {
                2: lambda: obey(Policy(Mode.OFF)),
                5: lambda: obey(Policy(Mode.FIXED, draft_len=2)),
                8: lambda: obey(Policy(Mode.FIXED, draft_len=3, max_draft_len=1)),
            }
        )
        stream = engine.submit("one", PROMPTS["2"], PARAMS, on_output=hook).wait()
    assert stream.tokens == expected["2"]
    drafted = [len(o.verify_step.draft_ids) if o.verify_step else 0 for o in stream.outputs[1:11]]
    assert drafted == [4, 4, 0, 0, 0, 2, 2, 2, 1, 1]
    reasons = [output.gate_reason for output in stream.outputs[1:11]]
    assert reasons == [GateReason.FIXED] * 2 + [GateReason.OPERATOR] * 8


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (Policy(Mode.FIXED, draft_len=LONGEST + 1), "draft_len"),
        (Policy(Mode.OFF, max_draft_len=-1), "max_draft_len"),
        (Policy(Mode.OFF, max_step_ms=0.0), "max_step_ms"),
    ],
)
def test_a_policy_out_of_range_changes_nothing(
    tiny: Target, tmp_path: Path, policy: Policy, field: str
) -> None:
    path = tmp_path / "policy.json"
    with running(tiny, draft_len=LONGEST, policy_file=str(path)) as engine:
        before = engine.engine.gate_state()["policy"]
        with pytest.raises(DraftgateError) as refused:
            engine.engine.set_policy(policy, save=True)
        assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, field)
        assert engine.engine.gate_state()["policy"] == before
    assert not path.exists()


def test_an_engine_without_step_times_cannot_go_by_them(tiny: Target) -> None:
    with running(tiny, draft_len=LONGEST, gate="fixed") as engine:
        with pytest.raises(DraftgateError, match="start it with --gate auto") as refused:
            engine.engine.set_policy(Policy(Mode.AUTO))
        assert (refused.value.code, refused.value.field) == (
            ErrorCode.FAILED_PRECONDITION,
            "mode",
        )
        assert engine.engine.gate_state()["policy"] == {
            "mode": "fixed",
            "draft_len": LONGEST,
            "max_draft_len": None,
            "max_step_ms": None,
            "max_tpot_ms": None,
        }


@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"draft_len": 0}])
def test_an_engine_that_drafts_nothing_cannot_be_made_to(
    tiny: Target, settings: dict[str, object]
) -> None:
    with running(tiny, **settings) as engine:
        assert not engine.engine.speculates
        with pytest.raises(DraftgateError, match="draft_len: got 2, allowed: an integer 0 to 0"):
            engine.engine.set_policy(Policy(Mode.FIXED, draft_len=2))
        engine.engine.set_policy(Policy(Mode.OFF))
        engine.engine.set_policy(Policy(Mode.AUTO))


# Saved policies


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", TINY)


@pytest.fixture
def load(checkpoint: Path, tmp_path: Path) -> Callable[..., Engine]:
    """An engine as a start makes it."""

    def loaded(**settings: object) -> Engine:
        defaults = {
            "dtype": "float32",
            "device": "cpu",
            "kv_cache_bytes": 1 << 28,
            "draft_len": LONGEST,
            "gate": "fixed",
            "policy_file": str(tmp_path / "state" / "policy.json"),
        }
        return Engine.load(checkpoint, EngineConfig.from_mapping({**defaults, **settings}))

    return loaded


def test_a_saved_policy_is_obeyed_after_a_restart(
    load: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = load()
    first.set_policy(Policy(Mode.FIXED, draft_len=2, max_step_ms=50.0), save=True)
    first.set_policy(Policy(Mode.OFF))
    caplog.set_level(logging.INFO, "draftgate")
    second = load()
    assert second.gate.policy == Policy(Mode.FIXED, draft_len=2, max_step_ms=50.0)
    (told,) = [record.message for record in caplog.records if "policy" in record.message]
    assert told == (
        f"the gate obeys the policy saved in {tmp_path}/state/policy.json: "
        '{"mode": "fixed", "draft_len": 2, "max_step_ms": 50.0}'
    )
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["policy.json"]


def test_without_a_file_nothing_can_be_saved(load: Callable[..., Engine]) -> None:
    engine = load(policy_file="")
    with pytest.raises(DraftgateError, match="started without a policy file") as refused:
        engine.set_policy(Policy(Mode.OFF), save=True)
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION
    assert engine.gate.policy.mode is Mode.FIXED


def test_a_file_that_cannot_be_written_changes_nothing(
    load: Callable[..., Engine], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    engine = load()
    (tmp_path / "state" / "policy.json").mkdir()
    with pytest.raises(DraftgateError, match=r"cannot write .*policy.json: ") as refused:
        engine.set_policy(Policy(Mode.OFF), save=True)
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION
    assert engine.gate.policy.mode is Mode.FIXED
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["policy.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is not valid JSON"),
        ('{"mode": "on"}', "mode: got 'on'"),
        ('{"mode": "fixed", "draft_len": 5}', "draft_len: got 5, allowed: an integer 0 to 4"),
        ('{"mode": "auto"}', "start it with --gate auto"),
        ('{"max_step_ms": 1' + 400 * "0" + "}", "max_step_ms: got 1000"),
    ],
)
def test_a_saved_policy_that_cannot_be_obeyed_is_a_clear_error(
    load: Callable[..., Engine], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "state" / "policy.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(DraftgateError) as failed:
        load()
    assert str(path) in failed.value.message
    assert message in failed.value.message


# What a start measures


def test_the_first_start_measures_once_and_says_so(
    load: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, "draftgate")
    engine = load(gate="auto", max_batch_rows=2)
    begins, ends = [record.message for record in caplog.records]
    assert begins.startswith("measuring what steps cost here")
    assert ends.startswith("measured what steps cost in ")
    (kept,) = (tmp_path / "cache").rglob("*.json")
    written = kept.read_bytes()
    counters, state = engine.counters(), engine.gate_state()
    assert (counters.steps, counters.emitted_tokens, counters.rows_freed_cancelled) == (0, 0, 0)
    assert (state["steps"], state["reasons"], state["switches"]) == (0, {}, 0)
    assert state["policy"]["mode"] == "auto"  # type: ignore[index]

    caplog.clear()
    again = load(gate="auto", max_batch_rows=2)
    assert caplog.records == []
    assert kept.read_bytes() == written
    assert again.gate_state()["costs"]["source"] == state["costs"]["source"]  # type: ignore[index]


# The state


def keys(value: object) -> object:
    """Its structure, without its values."""
    if isinstance(value, dict):
        return {key: keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value else []
    return None


def test_a_state_has_what_the_stand_in_for_triton_says(tiny: Target) -> None:
    with running(tiny, draft_len=LONGEST, drafter="ngram", started=False) as engine:
        engine.engine.use_costs(COSTS)
        engine.engine.start()
        engine.one((7, 8, 9, 10) * 8, greedy(40))
        found = json.loads(json.dumps(engine.engine.gate_state()))
    assert keys({**found, "reasons": {}}) == keys({**STATE, "reasons": {}})
    assert found["reasons"].keys() <= {str(int(reason)) for reason in GateReason}
    assert sum(found["reasons"].values()) == found["steps"]
    assert found["emitted_tokens"] == 40
    assert found["accepted_tokens"] <= found["drafted_tokens"]
    assert (found["running_rows"], found["waiting_rows"], found["kv_used_tokens"]) == (0, 0, 0)


def test_a_state_says_how_full_the_engine_is(tiny: Target) -> None:
    with running(tiny, max_batch_rows=2, started=False, drafter="none") as engine:
        for name in "0123":
            engine.submit(name, PROMPTS[name], greedy(3))
        assert engine.engine.gate_state()["waiting_rows"] == 4
        engine.engine.step()
        state = engine.engine.gate_state()
        assert (state["running_rows"], state["waiting_rows"]) == (2, 2)
        assert state["kv_used_tokens"] == 32
        while engine.engine.counters().running_rows:
            engine.engine.step()
