"""What goes to the engine and comes back means the same."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate.contract import DraftSource, GateReason
from draftgate.gateway.gate_convert import policy_mapping, state_message, steps_read
from draftgate.speculation import CostCurve, CostTable, Gate, Policy, StepRecord, gate_state

LONGEST = 64

counts = st.integers(0, 2**31 - 1)
milliseconds = st.floats(min_value=1e-6, max_value=1e9)


@st.composite
def policies(draw: st.DrawFn) -> pb.GatePolicy:
    mode = draw(st.sampled_from(pb.GateMode.values()))
    policy = pb.GatePolicy(mode=mode)
    if mode == pb.GATE_MODE_FIXED:
        policy.draft_len = draw(st.integers(0, LONGEST))
    if draw(st.booleans()):
        policy.max_draft_len = draw(st.integers(0, LONGEST))
    if draw(st.booleans()):
        policy.max_step_ms = draw(milliseconds)
    if draw(st.booleans()):
        policy.max_tpot_ms = draw(milliseconds)
    return policy


@given(policies())
def test_a_policy_comes_back_as_it_was_sent(sent: pb.GatePolicy) -> None:
    """Through the engine's policy, its state and a saved file's JSON."""
    told = json.loads(json.dumps(policy_mapping(sent)))
    policy = Policy.from_mapping(json.loads(json.dumps(Policy.from_mapping(told).to_mapping())))
    gate = Gate(range(LONGEST + 1), None, policy)
    text = json.dumps(gate_state(gate, None, now_s=0.0))
    expected = pb.GatePolicy()
    expected.CopyFrom(sent)
    expected.mode = sent.mode or pb.GATE_MODE_AUTO
    assert state_message(text).policy == expected


outcomes = st.tuples(st.sampled_from([int(source) for source in DraftSource]), counts, counts)
records = st.builds(
    StepRecord,
    step=st.integers(1, 2**53),
    time_s=st.floats(0, 1e9),
    rows=counts,
    prefill_tokens=counts,
    kv_tokens=st.integers(0, 2**53),
    draft_len=counts,
    reason=st.sampled_from(GateReason),
    drafted=counts,
    accepted=counts,
    outcomes=st.lists(outcomes, max_size=4).map(tuple),
    emitted=counts,
    expected_ms=st.none() | milliseconds,
    measured_ms=milliseconds,
)


@given(st.lists(records, max_size=4), counts)
def test_a_step_reaches_the_client_as_it_was(steps: list[StepRecord], lost: int) -> None:
    told = {"steps": [each.to_mapping() for each in steps], "lost": lost}
    read = steps_read(json.dumps({**told, "last_step": 7, "run": "x"}))
    assert (read.message.lost, read.last_step, read.run) == (lost, 7, "x")
    found = [
        StepRecord(
            step=each.step,
            time_s=each.time_s,
            rows=each.rows,
            prefill_tokens=each.prefill_tokens,
            kv_tokens=each.kv_tokens,
            draft_len=each.draft_len,
            reason=GateReason(each.reason),
            drafted=each.drafted_tokens,
            accepted=each.accepted_tokens,
            outcomes=tuple(
                (o.draft_source, o.drafted_tokens, o.accepted_tokens) for o in each.outcomes
            ),
            emitted=each.emitted_tokens,
            expected_ms=each.expected_ms if each.HasField("expected_ms") else None,
            measured_ms=each.measured_ms,
        )
        for each in read.message.steps
    ]
    assert found == steps


@given(milliseconds, st.floats(0, 1e9), st.floats(0, 1e9))
def test_what_a_gate_knows_reaches_the_client(time_ms: float, measured: float, now: float) -> None:
    table = CostTable({0: CostCurve((1,), (time_ms,))}, source="here", measured_at_s=measured)
    state = state_message(json.dumps(gate_state(Gate([0], table), None, now_s=now)))
    assert state.costs == pb.GateCosts(source="here", age_s=now - measured)
