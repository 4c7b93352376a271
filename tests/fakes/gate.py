"""The engine's control of its gate, for the stand-in for Triton: as strict, and scripted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from draftgate.errors import DraftgateError, invalid_argument
from draftgate.speculation import Policy

__all__ = ["STATE", "FakeGate", "step"]

STATE: Mapping[str, Any] = {
    "policy": {
        "mode": "auto",
        "draft_len": 0,
        "max_draft_len": None,
        "max_step_ms": 60.0,
        "max_tpot_ms": None,
    },
    "draft_len": 2,
    "reason": 8,
    "rows": 3,
    "steps": 1200,
    "switches": 4,
    "expected_step_ms": 44.0,
    "measured_step_ms": 45.5,
    "expected_speedup": 1.42,
    "candidates": [
        {"draft_len": 0, "tokens": 3.0, "step_ms": 38.0},
        {"draft_len": 2, "tokens": 5.5, "step_ms": 44.0},
    ],
    "acceptance": [
        {"source": 1, "rates": [0.68, 0.6, 0.5, 0.5]},
        {"source": 2, "rates": [0.8, 0.75, 0.7, 0.7]},
    ],
    "reasons": {"6": 20, "8": 1100, "12": 80},
    "costs": {
        "source": "some CPU; fake-135m; ngram",
        "age_s": 125.0,
        "corrections": [{"tokens": 2, "drafted": True, "ratio": 1.05, "observations": 20.0}],
    },
    "running_rows": 3,
    "waiting_rows": 1,
    "kv_used_tokens": 160,
    "kv_total_tokens": 4096,
    "emitted_tokens": 4000,
    "verify_steps": 1000,
    "drafted_tokens": 2000,
    "accepted_tokens": 1100,
    "uptime_s": 700.5,
}
"""What an engine says of its gate; a test holds it to what a real one says."""

_LONGEST = 4
_MOST = 256
_ARGUMENTS: Mapping[str, set[str]] = {
    "gate": set(),
    "set_gate_policy": {"policy", "save"},
    "gate_steps": {"after"},
}


class FakeGate:
    """Answers the operations about the gate, and fails on arguments that none of them has."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = json.loads(json.dumps(STATE))
        self.answers: list[str] = []
        """Answers to be given, whatever is asked, instead of the right ones."""
        self.saved: list[dict[str, Any]] = []
        """The policies that were to be kept."""
        self.failure: DraftgateError | None = None
        """What setting a policy fails with."""
        self.asked: list[str] = []
        self.steps: list[dict[str, Any]] = []
        """The steps that the engine still has."""
        self.run = "first"

    def control(self, asked: dict[str, Any]) -> str:
        """The answer in JSON. Raises DraftgateError as the engine does."""
        operation = asked.pop("op")
        assert operation in _ARGUMENTS, f"no such operation: {operation}"
        unknown = asked.keys() - _ARGUMENTS[operation]
        assert not unknown, f"{operation} takes no {unknown}"
        self.asked.append(operation)
        if self.answers:
            return self.answers.pop(0)
        if operation == "gate_steps":
            return json.dumps(self._steps(**asked))
        if operation == "set_gate_policy":
            self._set(**asked)
        return json.dumps(self.state)

    def _set(self, policy: dict[str, Any], save: bool) -> None:
        assert type(save) is bool
        found = Policy.from_mapping(policy)
        found.validate(_LONGEST)
        if self.failure is not None:
            raise self.failure
        self.state["policy"] = found.to_mapping()
        if save:
            self.saved.append(found.to_mapping())

    def _steps(self, after: int | None = None) -> dict[str, Any]:
        last = self.steps[-1]["step"] if self.steps else 0
        if after is None:
            return {"steps": [], "lost": 0, "last_step": last, "run": self.run}
        if after < 0:
            raise invalid_argument("after", after, "an integer from 0 on")
        steps = [each for each in self.steps if each["step"] > after][:_MOST]
        lost = max(self.steps[0]["step"] - after - 1, 0) if self.steps else 0
        return {"steps": steps, "lost": lost, "last_step": last, "run": self.run}


def step(number: int, **fields: Any) -> dict[str, Any]:
    """One step as the engine tells of it."""
    return {
        "step": number,
        "time_s": number / 20,
        "rows": 2,
        "prefill_tokens": 0,
        "kv_tokens": 100 + number,
        "draft_len": 2,
        "reason": 8,
        "drafted": 4,
        "accepted": 3,
        "outcomes": [[1, 2, 2], [2, 2, 1]],
        "emitted": 5,
        "expected_ms": 44.0,
        "measured_ms": 45.5,
        **fields,
    }
