"""Between the gate's protobuf messages and the engine's JSON about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.gateway.convert import DRAFT_SOURCES
from draftgate.speculation import Mode

__all__ = ["StepsRead", "policy_error", "policy_mapping", "state_message", "steps_read"]

_MODES = {
    pb.GATE_MODE_UNSPECIFIED: Mode.AUTO,
    pb.GATE_MODE_AUTO: Mode.AUTO,
    pb.GATE_MODE_OFF: Mode.OFF,
    pb.GATE_MODE_FIXED: Mode.FIXED,
}
_MODE_NUMBERS = {mode: number for number, mode in _MODES.items() if number}


@dataclass(frozen=True)
class StepsRead:
    """What the engine had of its steps."""

    message: pb.WatchStepsResponse
    last_step: int
    """Number of its latest step."""
    run: str
    """Names the run of the engine that numbered them."""


def policy_mapping(policy: pb.GatePolicy) -> dict[str, object]:
    """What the engine takes for a policy; it checks the ranges.

    Raises DraftgateError(INVALID_ARGUMENT) for an enum's number that there is no word for, and for
    a draft length without the mode fixed or the other way round.
    """
    if policy.mode not in _MODES:
        names = ", ".join(pb.GateMode.keys())
        raise invalid_argument("policy.mode", policy.mode, f"one of {names}")
    mode = _MODES[policy.mode]
    if policy.HasField("draft_len") != (mode is Mode.FIXED):
        given = policy.draft_len if policy.HasField("draft_len") else None
        allowed = "an integer" if mode is Mode.FIXED else "none: it goes with the mode fixed"
        raise invalid_argument("policy.draft_len", given, allowed)
    found: dict[str, object] = {"mode": str(mode)}
    for name in ("draft_len", "max_draft_len", "max_step_ms", "max_tpot_ms"):
        if policy.HasField(name):
            found[name] = getattr(policy, name)
    return found


def policy_error(error: DraftgateError) -> DraftgateError:
    """What the engine says of a policy, in the words of who sent it as `policy`."""
    if error.field not in pb.GatePolicy.DESCRIPTOR.fields_by_name:
        return error
    return DraftgateError(error.code, f"policy.{error.message}", field=f"policy.{error.field}")


def state_message(text: str) -> pb.GateState:
    """The engine's JSON as clients see it. Raises DraftgateError(INTERNAL) where it is no state."""
    with _well_formed("gate state"):
        raw = json.loads(text)
        raw["policy"] = _policy(raw["policy"])
        raw["acceptance"] = [
            {"draft_source": DRAFT_SOURCES[item["source"]], "rates": item["rates"]}
            for item in raw["acceptance"]
        ]
        raw["reasons"] = [
            {"reason": int(reason), "steps": steps} for reason, steps in raw["reasons"].items()
        ]
        # An engine may be newer than its gateway.
        return json_format.ParseDict(raw, pb.GateState(), ignore_unknown_fields=True)


def steps_read(text: str) -> StepsRead:
    """The engine's JSON of its steps. Raises DraftgateError(INTERNAL) where it is none."""
    with _well_formed("steps"):
        raw = json.loads(text)
        steps = [_step(item) for item in raw["steps"]]
        message = pb.WatchStepsResponse(steps=steps, lost=raw["lost"])
        return StepsRead(message, int(raw["last_step"]), str(raw["run"]))


def _policy(raw: dict[str, Any]) -> dict[str, object]:
    mode = Mode(raw["mode"])
    policy = {name: value for name, value in raw.items() if value is not None}
    if mode is not Mode.FIXED:
        policy.pop("draft_len", None)
    return {**policy, "mode": _MODE_NUMBERS[mode]}


def _step(raw: dict[str, Any]) -> pb.GateStep:
    return pb.GateStep(
        step=raw["step"],
        time_s=raw["time_s"],
        rows=raw["rows"],
        prefill_tokens=raw["prefill_tokens"],
        kv_tokens=raw["kv_tokens"],
        draft_len=raw["draft_len"],
        reason=raw["reason"],
        drafted_tokens=raw["drafted"],
        accepted_tokens=raw["accepted"],
        emitted_tokens=raw["emitted"],
        outcomes=[
            pb.GateOutcome(
                draft_source=DRAFT_SOURCES[source], drafted_tokens=drafted, accepted_tokens=accepted
            )
            for source, drafted, accepted in raw["outcomes"]
        ],
        expected_ms=raw["expected_ms"],
        measured_ms=raw["measured_ms"],
    )


@contextmanager
def _well_formed(what: str) -> Iterator[None]:
    try:
        yield
    except (
        AttributeError,
        KeyError,
        OverflowError,
        TypeError,
        ValueError,
        json_format.ParseError,
    ) as error:
        raise DraftgateError(ErrorCode.INTERNAL, f"the engine's {what} cannot be read") from error
