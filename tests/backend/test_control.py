"""The engine's control plane: JSON in, JSON out, on a real engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftgate.backend.control import Control
from draftgate.engine import Target, load_target
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from tests.support.engine import Running, greedy, running
from tests.support.tiny_models import TINY, write_checkpoint

Ask = Callable[..., dict[str, Any]]

PROMPT = (3, 14, 15, 92, 65, 35)
LONGEST = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY)
    return load_target(folder, torch.float32)


@pytest.fixture
def engine(tiny: Target, tmp_path: Path) -> Iterator[Running]:
    path = str(tmp_path / "policy.json")
    with running(tiny, draft_len=LONGEST, gate="fixed", policy_file=path) as found:
        yield found


@pytest.fixture
def ask(engine: Running, checkpoint_dir: Path) -> Ask:
    control = Control(engine.engine, Tokenizer.load(checkpoint_dir))
    return lambda op, **arguments: json.loads(control.answer(json.dumps({"op": op, **arguments})))


def test_a_policy_is_set_and_told(ask: Ask, tmp_path: Path) -> None:
    policy = {"mode": "fixed", "draft_len": 2, "max_step_ms": 50}
    state = ask("set_gate_policy", policy=policy)
    assert state["policy"] == {
        **policy,
        "max_step_ms": 50.0,
        "max_draft_len": None,
        "max_tpot_ms": None,
    }
    assert state == {**ask("gate"), "uptime_s": state["uptime_s"]}
    assert not (tmp_path / "policy.json").exists()
    ask("set_gate_policy", policy={"mode": "off"}, save=True)
    assert json.loads((tmp_path / "policy.json").read_text())["mode"] == "off"


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        ({"op": "set_gate_policy"}, "policy", "got None, allowed: a JSON object"),
        ({"op": "set_gate_policy", "policy": "off"}, "policy", "got 'off'"),
        (
            {"op": "set_gate_policy", "policy": {"mode": "off"}, "save": 1},
            "save",
            "got 1, allowed: true or false",
        ),
        ({"op": "set_gate_policy", "policy": {"speed": 1}}, "speed", "got 1, allowed: one of mode"),
        (
            {"op": "set_gate_policy", "policy": {"mode": "fixed", "draft_len": 5}},
            "draft_len",
            "got 5, allowed: an integer 0 to 4",
        ),
        ({"op": "gate_steps", "after": -1}, "after", "got -1, allowed: an integer 0 to"),
        ({"op": "gate_steps", "after": "1"}, "after", "got '1'"),
        ({"op": "gate_steps", "after": None}, "after", "got None"),
        ({"op": "gate_steps", "after": True}, "after", "got True"),
        (
            {"op": "gate_steps", "after": 0, "most": 257},
            "most",
            "got 257, allowed: an integer 1 to",
        ),
        ({"op": "gate_steps", "after": 0, "most": 0}, "most", "got 0"),
        (
            {"op": "gates"},
            "control.op",
            "got 'gates', allowed: describe, counters, gate, set_gate_policy or gate_steps",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    engine: Running, checkpoint_dir: Path, asked: dict[str, Any], field: str, message: str
) -> None:
    control = Control(engine.engine, Tokenizer.load(checkpoint_dir))
    before = json.loads(control.answer('{"op": "gate"}'))["policy"]
    with pytest.raises(DraftgateError) as refused:
        control.answer(json.dumps(asked))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_ARGUMENT, field)
    assert refused.value.message.startswith(f"{field}: {message}")
    assert json.loads(control.answer('{"op": "gate"}'))["policy"] == before


def test_steps_are_told_from_any_place_on(ask: Ask, engine: Running) -> None:
    none = ask("gate_steps")
    assert (none["steps"], none["lost"], none["last_step"]) == ([], 0, 0)
    engine.one(PROMPT, greedy(10))
    now = ask("gate_steps")
    assert (now["steps"], now["lost"], now["run"]) == ([], 0, none["run"])
    last = now["last_step"]
    assert last > 3
    everything = ask("gate_steps", after=0)["steps"]
    assert [each["step"] for each in everything] == list(range(1, last + 1))
    assert sum(each["emitted"] for each in everything) == 10
    assert ask("gate_steps", after=1, most=2)["steps"] == everything[1:3]
    assert ask("gate_steps", after=last)["steps"] == []


def test_a_description_says_whether_anything_is_drafted(
    ask: Ask, tiny: Target, checkpoint_dir: Path
) -> None:
    assert (ask("describe")["drafter"], ask("describe")["max_draft_len"]) == ("ngram", LONGEST)
    with running(tiny, drafter="none") as engine:
        control = Control(engine.engine, Tokenizer.load(checkpoint_dir))
        described = json.loads(control.answer('{"op": "describe"}'))
    assert (described["drafter"], described["max_draft_len"]) == ("", 0)
