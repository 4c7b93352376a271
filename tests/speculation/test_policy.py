"""An operator's wishes are checked."""

from __future__ import annotations

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation import Mode, Policy


def test_a_policy_comes_back_from_what_it_is_written_as() -> None:
    policy = Policy(Mode.FIXED, draft_len=2, max_draft_len=3, max_step_ms=50.0, max_tpot_ms=20.0)
    assert Policy.from_mapping(policy.to_mapping()) == policy
    assert Policy.from_mapping({}) == Policy()
    assert Policy.from_mapping({"mode": "off"}).mode is Mode.OFF


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"mode": "on"}, "mode: got 'on', allowed: auto or off or fixed"),
        ({"mode": 3}, "mode: got 3"),
        ({"speed": 3}, "speed: got 3, allowed: one of mode, draft_len"),
        ({"draft_len": "2"}, "draft_len: got '2', allowed: an integer"),
        ({"draft_len": True}, "draft_len: got True"),
        ({"draft_len": None}, "draft_len: got None"),
        ({"max_draft_len": 1.5}, "max_draft_len: got 1.5"),
        ({"max_step_ms": "fast"}, "max_step_ms: got 'fast'"),
        ({"max_tpot_ms": True}, "max_tpot_ms: got True"),
        ({"max_tpot_ms": 10**400}, "max_tpot_ms: got 1000"),
        ({"draft_len": 9}, "draft_len: got 9, allowed: an integer 0 to 8"),
        ({"draft_len": -1}, "draft_len: got -1"),
        ({"max_draft_len": 9}, "max_draft_len: got 9"),
        ({"max_step_ms": 0}, "max_step_ms: got 0.0, allowed: a time above 0"),
        ({"max_step_ms": float("nan")}, "max_step_ms: got nan"),
        ({"max_tpot_ms": float("inf")}, "max_tpot_ms: got inf"),
    ],
)
def test_a_wrong_policy_is_refused_by_name(raw: dict[str, object], message: str) -> None:
    with pytest.raises(DraftgateError, match=message) as refused:
        Policy.from_mapping(raw).validate(8)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert refused.value.field in raw
