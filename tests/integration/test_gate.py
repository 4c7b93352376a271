"""An operator at the gate of the real stack, while streams run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2
from draftgate.engine.gating import draft_lens
from tests.integration.conftest import FIXED, LONGEST, ROWS, Served, set_policy
from tests.support.gateway import Client, Outcome
from tests.support.terminal import run_in_pipe

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

AUTO = pb.GatePolicy(mode=pb.GATE_MODE_AUTO)
OFF = pb.GatePolicy(mode=pb.GATE_MODE_OFF)
TOKENS = 48

OPERATOR = generation_pb2.GATE_REASON_OPERATOR
BY_LOAD = {
    generation_pb2.GATE_REASON_GAIN,
    generation_pb2.GATE_REASON_LOW_ACCEPTANCE,
    generation_pb2.GATE_REASON_COMPUTE_BOUND,
    generation_pb2.GATE_REASON_DWELL,
    generation_pb2.GATE_REASON_PROBE,
}
OF_THE_ROW = {
    generation_pb2.GATE_REASON_PREFILL,
    generation_pb2.GATE_REASON_BUDGET,
    generation_pb2.GATE_REASON_NO_DRAFT,
}


@pytest.fixture(autouse=True)
def as_it_was(served: Served) -> Iterator[None]:
    yield
    set_policy(served.address, FIXED)
    served.policy_file.unlink(missing_ok=True)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    """Of the gateway as it is served alone: where it enters makes no difference to the gate."""
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield Client(channel)


def asked(index: int, **more: Any) -> dict[str, Any]:
    """A request for text that is quoted in part, so that both drafters have something to say."""
    content = f"Repeat twice: the quick brown fox number {index} jumps over the lazy dog."
    return {
        "messages": [generation_pb2.ChatMessage(role="user", content=content)],
        "max_tokens": TOKENS,
        "sampling": generation_pb2.SamplingParameters(temperature=0.0, ignore_eos=True),
        **more,
    }


async def set_to(client: Client, policy: pb.GatePolicy, *, save: bool = False) -> pb.GateState:
    request = pb.SetPolicyRequest(policy=policy, save=save)
    return (await client.gate.SetPolicy(request)).state


async def state_of(client: Client) -> pb.GateState:
    return (await client.gate.GetState(pb.GetStateRequest())).state


async def run(client: Client, count: int, **more: Any) -> list[Outcome]:
    outcomes = await asyncio.gather(*(client.generate(**asked(n, **more)) for n in range(count)))
    for outcome in outcomes:
        assert outcome.code is grpc.StatusCode.OK
        assert len(outcome.tokens) == TOKENS
    return outcomes


def reasons(outcomes: list[Outcome]) -> set[int]:
    return {chunk.gate_reason for outcome in outcomes for chunk in outcome.chunks}


async def test_a_policy_changes_streams_that_run_and_never_their_text(client: Client) -> None:
    plain = await run(client, 4, max_draft_len=0)
    running = asyncio.create_task(run(client, 4))
    policies = [
        OFF,
        AUTO,
        pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=1),
        pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_draft_len=2, max_step_ms=500.0),
        FIXED,
    ]
    turn = 0
    while not running.done():
        state = await set_to(client, policies[turn % len(policies)])
        assert state.policy == policies[turn % len(policies)]
        turn += 1
        await asyncio.sleep(0.05)
    assert turn > len(policies)
    outcomes = await running
    assert [o.text for o in outcomes] == [o.text for o in plain]
    assert OPERATOR in reasons(outcomes)


async def test_off_holds_from_the_next_step(client: Client) -> None:
    call = client.generation.Generate(generation_pb2.GenerateRequest(**asked(0, max_tokens=400)))
    while not (event := await call.read()).HasField("tokens") or not event.tokens.verify_steps:
        pass
    await set_to(client, OFF)
    before = await state_of(client)
    steps = client.gate.WatchSteps(pb.WatchStepsRequest(after_step=before.steps, interval_ms=50))
    seen: list[pb.GateStep] = []
    while len(seen) < 11:
        seen += (await steps.read()).steps
    steps.cancel()
    call.cancel()
    # The first may have been under way.
    assert {(each.draft_len, each.drafted_tokens, each.reason) for each in seen[1:]} == {
        (0, 0, OPERATOR)
    }


async def test_responses_say_why(client: Client) -> None:
    assert reasons(await run(client, 2)) <= {OPERATOR} | OF_THE_ROW
    capped = await run(client, 2, max_draft_len=0)
    assert reasons(capped) == {
        generation_pb2.GATE_REASON_REQUEST_CAP,
        generation_pb2.GATE_REASON_PREFILL,
    }
    await set_to(client, AUTO)
    found = reasons(await run(client, 2))
    assert found <= BY_LOAD | OF_THE_ROW
    assert found & BY_LOAD
    counted = {each.reason: each.steps for each in (await state_of(client)).reasons}
    # A row may be granted less than the batch drafts, since it accepts less.
    of_steps = (found & BY_LOAD) - {generation_pb2.GATE_REASON_LOW_ACCEPTANCE}
    assert of_steps <= counted.keys()


async def test_the_state_is_the_engines(client: Client) -> None:
    state = await set_to(client, AUTO)
    assert state.costs.source.endswith("hybrid")
    assert 0 <= state.costs.age_s < 365 * 86400
    before = await state_of(client)
    outcomes = await run(client, 3)
    after = await state_of(client)
    assert after.steps > before.steps
    assert after.uptime_s > before.uptime_s
    assert after.emitted_tokens - before.emitted_tokens == 3 * TOKENS
    speculation = [outcome.finished.speculation for outcome in outcomes]
    for name in ("drafted_tokens", "accepted_tokens", "verify_steps"):
        told = sum(getattr(each, name) for each in speculation)
        assert getattr(after, name) - getattr(before, name) == told
    assert (after.running_rows, after.waiting_rows, after.kv_used_tokens) == (0, 0, 0)
    assert [each.draft_len for each in after.candidates] == list(draft_lens(LONGEST))
    assert after.expected_speedup > 0
    assert sum(each.steps for each in after.reasons) >= after.steps - 1


async def test_a_watch_sees_rows_come_and_go(client: Client) -> None:
    watch = client.gate.WatchState(pb.WatchStateRequest(interval_ms=50))
    running = asyncio.create_task(run(client, 5))
    while (await watch.read()).state.running_rows != 5:
        pass
    await running
    while (state := (await watch.read()).state).running_rows:
        assert state.kv_used_tokens > 0
    watch.cancel()


async def steps_of(client: Client) -> AsyncIterator[pb.WatchStepsResponse]:
    call = client.gate.WatchSteps(pb.WatchStepsRequest(interval_ms=50))
    async for batch in call:
        yield batch


async def test_every_step_is_told(client: Client) -> None:
    batches = steps_of(client)
    await anext(batches)
    outcomes = await run(client, 3)
    last = (await state_of(client)).steps
    steps: list[pb.GateStep] = []
    while not steps or steps[-1].step < last:
        batch = await anext(batches)
        assert batch.lost == 0
        steps += batch.steps
    await batches.aclose()  # type: ignore[attr-defined]
    assert [each.step for each in steps] == list(range(steps[0].step, last + 1))
    assert sum(each.emitted_tokens for each in steps) == 3 * TOKENS
    speculation = [outcome.finished.speculation for outcome in outcomes]
    drafted = sum(each.drafted_tokens for each in speculation)
    accepted = sum(each.accepted_tokens for each in speculation)
    assert sum(each.drafted_tokens for each in steps) == drafted > 0
    assert sum(each.accepted_tokens for each in steps) == accepted
    assert sum(len(each.outcomes) for each in steps) == sum(s.verify_steps for s in speculation)
    prompts = sum(outcome.events[0].started.prompt_tokens for outcome in outcomes)
    assert sum(each.prefill_tokens for each in steps) == prompts
    assert max(each.rows for each in steps) == 3


async def test_a_policy_out_of_range_is_refused_and_nothing_changes(
    client: Client, served: Served
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await set_to(client, pb.GatePolicy(mode=pb.GATE_MODE_OFF, max_draft_len=9), save=True)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == (
        f"policy.max_draft_len: got 9, allowed: an integer 0 to {LONGEST}"
    )
    assert (await state_of(client)).policy == FIXED
    assert not served.policy_file.exists()


# The commands


async def test_the_commands_steer_a_server(served: Served) -> None:
    done = await run_in_pipe(
        ["gate", "set", "--mode", "auto", "--max-step-ms", "250", "--save"],
        env={"DRAFTGATE_SERVER": served.address},
    )
    assert (done.code, done.err) == (0, "")
    assert done.out == f"was\tfixed, draft_len {LONGEST}\nis\tauto, max_step_ms 250\n"
    assert json.loads(served.policy_file.read_text())["max_step_ms"] == 250.0
    done = await run_in_pipe(["gate", "state", "--server", served.address])
    assert "policy\tauto, max_step_ms 250\n" in done.out
    done = await run_in_pipe(["top", "--server", served.address, "--interval-ms", "100"])
    assert done.code == 0
    assert f"0 of {ROWS} running, 0 waiting" in done.out


async def test_a_recording_of_real_steps(client: Client, served: Served, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    await set_to(client, AUTO)
    recording = asyncio.create_task(
        run_in_pipe(["gate", "record", "--out", str(out), "--server", served.address,
                     "--steps", "20"])
    )  # fmt: skip
    while not recording.done():
        await run(client, 2)
    assert (await recording).code == 0
    header, *steps = map(json.loads, out.read_text().splitlines())
    assert (header["format"], header["drafter"]) == ("draftgate-steps/1", "hybrid")
    assert len(steps) == 20
    first = steps[0]["step"]
    assert [each["step"] for each in steps] == list(range(first, first + 20))
    for each in steps:
        assert each["measured_ms"] > 0
        assert each["drafted"] == sum(drafted for _, drafted, _ in each["outcomes"])
        assert each["reason"] in {"gain", "low_acceptance", "compute_bound", "dwell", "probe",
                                  "prefill"}  # fmt: skip
    assert "fox" not in out.read_text()
