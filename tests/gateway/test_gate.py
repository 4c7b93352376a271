"""`GateService` over the wire: what the engine says of its gate, policies for it, its steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2
from draftgate.contract import DraftSource, GateReason
from draftgate.errors import DraftgateError, ErrorCode
from tests.fakes.gate import STATE, step
from tests.fakes.triton import FakeTriton
from tests.support.gateway import Client, connected, running_gateway

FAST = {"interval_ms": 50}


async def get_state(client: Client) -> pb.GateState:
    return (await client.gate.GetState(pb.GetStateRequest())).state


async def set_policy(client: Client, save: bool = False, **fields: Any) -> pb.GateState:
    request = pb.SetPolicyRequest(policy=pb.GatePolicy(**fields), save=save)
    return (await client.gate.SetPolicy(request)).state


def bad_field(error: grpc.aio.AioRpcError) -> str:
    """The field that the status' BadRequest names."""
    found = rpc_status.from_call(error)
    assert found is not None
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in found.details)
    return str(bad.field_violations[0].field)


# State


async def test_a_state_has_all_that_the_engine_says(client: Client, triton: FakeTriton) -> None:
    state = await get_state(client)
    assert state.policy == pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_step_ms=60.0)
    assert (state.draft_len, state.reason) == (2, generation_pb2.GATE_REASON_GAIN)
    assert state.candidates[1] == pb.GateCandidate(draft_len=2, tokens=5.5, step_ms=44.0)
    assert state.acceptance[1].draft_source == generation_pb2.DRAFT_SOURCE_NGRAM
    assert list(state.acceptance[1].rates) == [0.8, 0.75, 0.7, 0.7]
    assert {each.reason: each.steps for each in state.reasons} == {6: 20, 8: 1100, 12: 80}
    assert state.costs.age_s == 125.0
    assert state.costs.corrections[0].drafted
    plain = STATE.keys() - {"policy", "candidates", "acceptance", "reasons", "costs"}
    assert {name: getattr(state, name) for name in plain} == {name: STATE[name] for name in plain}
    named = {field.name for field, _ in state.ListFields()}
    assert named == set(pb.GateState.DESCRIPTOR.fields_by_name) == set(STATE)


async def test_what_the_engine_does_not_know_is_absent(client: Client, triton: FakeTriton) -> None:
    triton.gate.state |= {"expected_speedup": None, "expected_step_ms": None, "costs": None}
    state = await get_state(client)
    for name in ("expected_speedup", "expected_step_ms", "costs"):
        assert not state.HasField(name)


@pytest.mark.parametrize("reason", list(GateReason))
async def test_every_reason_has_a_name_in_the_api(
    client: Client, triton: FakeTriton, reason: GateReason
) -> None:
    triton.gate.state["reason"] = int(reason)
    name = generation_pb2.GateReason.Name((await get_state(client)).reason)
    assert name.removeprefix("GATE_REASON_") == (reason.name if reason else "UNSPECIFIED")


async def test_a_newer_engines_fields_and_reasons_do_no_harm(
    client: Client, triton: FakeTriton
) -> None:
    triton.gate.state |= {"mood": "fine", "reason": 77, "reasons": {"77": 3}}
    state = await get_state(client)
    assert state.reason == 77
    assert state.reasons[0].reason == 77


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        '{"policy": []}',
        '{"policy": {"mode": "on"}, "acceptance": [], "reasons": {}}',
        '{"policy": {"mode": "off"}, "acceptance": [{"source": 9, "rates": []}], "reasons": {}}',
        '{"policy": {"mode": "off"}, "acceptance": [], "reasons": {"low": 1}}',
        '{"policy": {"mode": "off"}, "acceptance": [], "reasons": {}, "steps": "many"}',
        f'{{"policy": {{"mode": "off"}}, "acceptance": [], "reasons": {{}}, "rows": {10**400}}}',
    ],
)
async def test_a_state_that_is_none_is_an_internal_error(
    client: Client, triton: FakeTriton, answer: str
) -> None:
    triton.gate.answers = [answer]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await get_state(client)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "the engine's gate state cannot be read"
    assert (await get_state(client)).steps == 1200


async def test_a_watch_goes_on_and_sees_changes(client: Client, triton: FakeTriton) -> None:
    call = client.gate.WatchState(pb.WatchStateRequest(**FAST))
    assert (await call.read()).state.steps == 1200
    triton.gate.state["steps"] = 1300
    while (await call.read()).state.steps != 1300:
        pass
    call.cancel()


async def test_a_watch_ends_when_its_caller_leaves(client: Client, triton: FakeTriton) -> None:
    call = client.gate.WatchState(pb.WatchStateRequest(**FAST))
    await call.read()
    call.cancel()
    asked = -1
    while asked != (asked := len(triton.gate.asked)):
        await asyncio.sleep(0.3)


@pytest.mark.parametrize("interval_ms", [0, 49, -1, 60_001, 2**31 - 1])
@pytest.mark.parametrize("what", ["state", "steps"])
async def test_an_interval_out_of_range_is_refused(
    client: Client, what: str, interval_ms: int
) -> None:
    call: Any = (
        client.gate.WatchState(pb.WatchStateRequest(interval_ms=interval_ms))
        if what == "state"
        else client.gate.WatchSteps(pb.WatchStepsRequest(interval_ms=interval_ms))
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert bad_field(refused.value) == "interval_ms"
    assert refused.value.details() == (
        f"interval_ms: got {interval_ms}, allowed: an integer 50 to 60000"
    )


@pytest.mark.parametrize("what", ["state", "steps"])
async def test_a_drain_ends_watches(triton: FakeTriton, what: str) -> None:
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        slow = {"interval_ms": 60_000}
        call: Any = (
            client.gate.WatchState(pb.WatchStateRequest(**slow))
            if what == "state"
            else client.gate.WatchSteps(pb.WatchStepsRequest(**slow))
        )
        await call.read()
        await gateway.drain(0.0)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ended.value.details() == "the server is shutting down"


# Policies


async def test_a_policy_replaces_the_whole_one(client: Client, triton: FakeTriton) -> None:
    state = await set_policy(client, mode=pb.GATE_MODE_FIXED, draft_len=3)
    assert state.policy == pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=3)
    assert triton.gate.state["policy"]["max_step_ms"] is None
    state = await set_policy(
        client, mode=pb.GATE_MODE_AUTO, max_draft_len=2, max_step_ms=50.5, max_tpot_ms=20.0
    )
    assert triton.gate.state["policy"] == {
        "mode": "auto",
        "draft_len": 0,
        "max_draft_len": 2,
        "max_step_ms": 50.5,
        "max_tpot_ms": 20.0,
    }
    assert triton.gate.saved == []


async def test_a_policy_is_kept_when_that_is_asked_for(client: Client, triton: FakeTriton) -> None:
    await set_policy(client, save=True, mode=pb.GATE_MODE_OFF)
    (saved,) = triton.gate.saved
    assert saved["mode"] == "off"


async def test_what_was_read_can_be_sent_back(client: Client) -> None:
    """With one field changed, which is how to change one field."""
    policy = (await get_state(client)).policy
    policy.mode = pb.GATE_MODE_OFF
    state = (await client.gate.SetPolicy(pb.SetPolicyRequest(policy=policy))).state
    assert state.policy == pb.GatePolicy(mode=pb.GATE_MODE_OFF, max_step_ms=60.0)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"mode": 9}, "mode", "got 9, allowed: one of GATE_MODE_UNSPECIFIED, GATE_MODE_AUTO"),
        ({"mode": pb.GATE_MODE_FIXED}, "draft_len", "got None, allowed: an integer"),
        (
            {"mode": pb.GATE_MODE_AUTO, "draft_len": 2},
            "draft_len",
            "got 2, allowed: none: it goes with the mode fixed",
        ),
        ({"draft_len": 0}, "draft_len", "got 0, allowed: none"),
        (
            {"mode": pb.GATE_MODE_FIXED, "draft_len": 5},
            "draft_len",
            "got 5, allowed: an integer 0 to 4",
        ),
        ({"mode": pb.GATE_MODE_FIXED, "draft_len": -1}, "draft_len", "got -1"),
        ({"max_draft_len": 5}, "max_draft_len", "got 5, allowed: an integer 0 to 4"),
        ({"max_step_ms": 0.0}, "max_step_ms", "got 0.0, allowed: a time above 0, in ms"),
        ({"max_step_ms": -3.0}, "max_step_ms", "got -3.0"),
        ({"max_step_ms": float("nan")}, "max_step_ms", "got nan"),
        ({"max_tpot_ms": float("inf")}, "max_tpot_ms", "got inf"),
    ],
)
async def test_a_policy_out_of_range_is_refused_by_name(
    client: Client, triton: FakeTriton, fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_policy(client, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bad_field(refused.value) == f"policy.{field}"
    assert (refused.value.details() or "").startswith(f"policy.{field}: {message}")
    assert triton.gate.state == STATE


async def test_no_policy_is_not_the_default_one(client: Client, triton: FakeTriton) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.gate.SetPolicy(pb.SetPolicyRequest(save=True))
    assert bad_field(refused.value) == "policy"
    assert triton.gate.state == STATE


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            DraftgateError(
                ErrorCode.FAILED_PRECONDITION, "mode: auto goes by measured", field="mode"
            ),
            "policy.mode: auto goes by measured",
        ),
        (
            DraftgateError(ErrorCode.FAILED_PRECONDITION, "the policy cannot be saved: no room"),
            "the policy cannot be saved: no room",
        ),
    ],
)
async def test_what_the_engine_cannot_do_is_told(
    client: Client, triton: FakeTriton, failure: DraftgateError, message: str
) -> None:
    triton.gate.failure = failure
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_policy(client, mode=pb.GATE_MODE_AUTO)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == message


async def test_without_an_engine_everything_is_unavailable(
    client: Client, triton: FakeTriton
) -> None:
    await triton.stop()
    for call in (
        client.gate.GetState(pb.GetStateRequest()),
        client.gate.SetPolicy(pb.SetPolicyRequest(policy=pb.GatePolicy())),
        client.gate.WatchState(pb.WatchStateRequest()).read(),
        client.gate.WatchSteps(pb.WatchStepsRequest()).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


# Steps


async def batches(client: Client, **fields: Any) -> AsyncIterator[pb.WatchStepsResponse]:
    call = client.gate.WatchSteps(pb.WatchStepsRequest(**(FAST | fields)))
    async for batch in call:
        yield batch


async def test_steps_come_from_now_on(client: Client, triton: FakeTriton) -> None:
    triton.gate.steps = [step(n) for n in range(1, 8)]
    found = batches(client)
    first = await anext(found)
    assert (list(first.steps), first.lost) == ([], 0)
    triton.gate.steps += [step(8), step(9, outcomes=[], expected_ms=None, reason=99)]
    second = await anext(found)
    assert [each.step for each in second.steps] == [8, 9]
    whole, bare = second.steps
    assert whole == pb.GateStep(
        step=8,
        time_s=0.4,
        rows=2,
        kv_tokens=108,
        draft_len=2,
        reason=generation_pb2.GATE_REASON_GAIN,
        drafted_tokens=4,
        accepted_tokens=3,
        emitted_tokens=5,
        outcomes=[
            pb.GateOutcome(
                draft_source=generation_pb2.DRAFT_SOURCE_EAGLE, drafted_tokens=2, accepted_tokens=2
            ),
            pb.GateOutcome(
                draft_source=generation_pb2.DRAFT_SOURCE_NGRAM, drafted_tokens=2, accepted_tokens=1
            ),
        ],
        expected_ms=44.0,
        measured_ms=45.5,
    )
    assert not bare.HasField("expected_ms")
    assert bare.reason == 99
    triton.gate.steps.append(step(10))
    assert [each.step for each in (await anext(found)).steps] == [10]


async def test_more_steps_than_one_answer_has_come_in_order(
    client: Client, triton: FakeTriton
) -> None:
    triton.gate.steps = [step(n) for n in range(1, 701)]
    found = batches(client, after_step=0, interval_ms=60_000)
    numbers: list[int] = []
    while len(numbers) < 700:
        numbers += [each.step for each in (await anext(found)).steps]
    assert numbers == list(range(1, 701))


async def test_steps_that_are_gone_are_counted(client: Client, triton: FakeTriton) -> None:
    triton.gate.steps = [step(n) for n in range(11, 21)]
    found = batches(client, after_step=4)
    first = await anext(found)
    assert first.lost == 6
    assert [each.step for each in first.steps] == list(range(11, 21))
    triton.gate.steps = [step(n) for n in range(31, 33)]
    second = await anext(found)
    assert second.lost == 10
    assert [each.step for each in second.steps] == [31, 32]


async def test_nothing_is_sent_while_nothing_happens(client: Client, triton: FakeTriton) -> None:
    found = batches(client)
    await anext(found)
    asked = len(triton.gate.asked)
    await triton.wait_for(lambda: len(triton.gate.asked) > asked + 2)
    triton.gate.steps.append(step(1))
    assert [each.step for each in (await anext(found)).steps] == [1]


@pytest.mark.parametrize("source", list(DraftSource)[1:])
async def test_every_drafter_has_a_name_in_a_step(
    client: Client, triton: FakeTriton, source: DraftSource
) -> None:
    triton.gate.steps = [step(1, outcomes=[[int(source), 2, 1]])]
    batch = await anext(batches(client, after_step=0))
    (outcome,) = batch.steps[0].outcomes
    assert generation_pb2.DraftSource.Name(outcome.draft_source) == f"DRAFT_SOURCE_{source.name}"


async def test_an_engine_that_was_restarted_ends_the_watch(
    client: Client, triton: FakeTriton
) -> None:
    """Whatever the numbers say: they begin again, and may have come further already."""
    triton.gate.steps = [step(1)]
    found = batches(client)
    await anext(found)
    triton.gate.run, triton.gate.steps = "second", [step(1), step(2)]
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await anext(found)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "restarted" in (ended.value.details() or "")


@pytest.mark.parametrize(
    ("after_step", "allowed"), [(-1, "an integer from 0 on"), (3, "0 to 2, the engine's last step")]
)
async def test_a_place_to_begin_that_is_none_is_refused(
    client: Client, triton: FakeTriton, after_step: int, allowed: str
) -> None:
    triton.gate.steps = [step(1), step(2)]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(batches(client, after_step=after_step))
    assert bad_field(refused.value) == "after_step"
    assert refused.value.details() == f"after_step: got {after_step}, allowed: {allowed}"


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "{}",
        '{"steps": [{}], "lost": 0, "last_step": 1, "run": "x"}',
        '{"steps": [[1]], "lost": 0, "last_step": 1, "run": "x"}',
        '{"steps": [], "lost": "none", "last_step": 1, "run": "x"}',
    ],
)
async def test_steps_that_are_none_are_an_internal_error(
    client: Client, triton: FakeTriton, answer: str
) -> None:
    triton.gate.answers = list(itertools.repeat(answer, 1))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await anext(batches(client))
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "the engine's steps cannot be read"
