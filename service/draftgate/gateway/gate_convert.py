"""Between the gate's protobuf messages and its JSON."""

from __future__ import annotations

import json

from google.protobuf import json_format

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.gateway.convert import DRAFT_SOURCES
from draftgate.speculation import Mode

__all__ = ["policy_mapping", "state_message"]

_MODES = {
    pb.GATE_MODE_UNSPECIFIED: Mode.AUTO,
    pb.GATE_MODE_AUTO: Mode.AUTO,
    pb.GATE_MODE_OFF: Mode.OFF,
    pb.GATE_MODE_FIXED: Mode.FIXED,
}
_MODE_NUMBERS = {mode: number for number, mode in _MODES.items() if number}


def policy_mapping(policy: pb.GatePolicy) -> dict[str, object]:
    """What the engine takes for a policy.

    Raises DraftgateError(INVALID_ARGUMENT) for an enum's number that there is no word for.
    """
    if policy.mode not in _MODES:
        names = ", ".join(pb.GateMode.keys())
        raise invalid_argument("policy.mode", policy.mode, f"one of {names}")
    found: dict[str, object] = {"mode": str(_MODES[policy.mode]), "draft_len": policy.draft_len}
    for name in ("max_draft_len", "max_step_ms", "max_tpot_ms"):
        if policy.HasField(name):
            found[name] = getattr(policy, name)
    return found


def state_message(text: str) -> pb.GateState:
    """The engine's JSON as clients see it. Raises DraftgateError(INTERNAL) where it is no state."""
    try:
        raw = json.loads(text)
        policy = dict(raw["policy"])
        policy["mode"] = _MODE_NUMBERS[Mode(policy["mode"])]
        raw["policy"] = policy
        raw["acceptance"] = [
            {"draft_source": DRAFT_SOURCES[item["source"]], "rates": item["rates"]}
            for item in raw["acceptance"]
        ]
        raw["reasons"] = [
            {"reason": int(reason), "steps": steps} for reason, steps in raw["reasons"].items()
        ]
        return json_format.ParseDict(raw, pb.GateState())
    except (KeyError, ValueError, TypeError, json_format.ParseError) as error:
        raise DraftgateError(ErrorCode.INTERNAL, "the engine's gate state is malformed") from error
