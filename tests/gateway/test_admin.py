"""`AdminService` over the wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import admin_pb2 as pb
from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate.upstream.replica import ReplicaState
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import Client, connected, running_gateway

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


@pytest.fixture
async def client(triton: FakeTriton, second: FakeTriton) -> AsyncIterator[Client]:
    """Of a gateway with two replicas, both ready."""
    async with (
        running_gateway(f"{triton.target},{second.target}") as gateway,
        connected(gateway) as found,
    ):
        await found.wait_all_ready()
        yield found


async def test_replicas_are_listed(client: Client, triton: FakeTriton, second: FakeTriton) -> None:
    ready = pb.Replica(address=triton.target, state=pb.REPLICA_STATE_READY, model="fake-135m")
    found = await client.replicas()
    assert list(found) == [triton.target, second.target]
    assert found[triton.target] == ready
    second.server_ready = False
    while (found := await client.replicas())[second.target].state == pb.REPLICA_STATE_READY:
        await asyncio.sleep(0.01)
    assert found[second.target] == pb.Replica(
        address=second.target,
        state=pb.REPLICA_STATE_NOT_READY,
        reason="the model server is not ready",
    )
    triton.default = ENDLESS
    running = asyncio.create_task(client.generate(input_ids=[1, 2], max_tokens=500, timeout=60))
    await triton.wait_for(lambda: bool(triton.generations))
    listed = (await client.replicas())[triton.target]
    assert listed.generations == 1
    assert 0 < listed.outstanding_tokens <= 502
    running.cancel()
    await asyncio.wait({running})


@pytest.mark.parametrize("state", list(ReplicaState))
def test_every_state_has_a_name_in_the_api(state: ReplicaState) -> None:
    assert f"REPLICA_STATE_{state.name}" in pb.ReplicaState.keys()  # noqa: SIM118  # no mapping


async def test_a_drained_replica_finishes_what_it_has(
    client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    slow = [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s=0.02) for n in range(30)]
    triton.default = second.default = Script(slow)
    running = asyncio.create_task(client.generate(prompt="Hi"))
    await triton.wait_for(lambda: bool(triton.generations or second.generations))
    used, other = (triton, second) if triton.generations else (second, triton)
    other.default = words("other")
    answer = await client.admin.DrainReplica(pb.DrainReplicaRequest(address=used.target))
    assert answer.replica.state == pb.REPLICA_STATE_DRAINING
    for _ in range(4):
        assert (await client.generate(prompt="Hi")).text == "other"
    outcome = await running
    assert outcome.text == "".join(f"{n} " for n in range(30))
    assert outcome.finished.resumes == 0
    undrained = await client.admin.UndrainReplica(pb.UndrainReplicaRequest(address=used.target))
    assert undrained.replica.state == pb.REPLICA_STATE_READY
    await client.admin.DrainReplica(pb.DrainReplicaRequest(address=other.target))
    used.default = words("used")
    assert (await client.generate(prompt="Hi")).text == "used"


async def test_a_drained_replica_may_give_away_what_it_has(
    client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = Script([Step({"output_ids": [1]}, delay_s=3600.0)])
    running = asyncio.create_task(client.generate(prompt="Hi"))
    await triton.wait_for(lambda: bool(triton.generations or second.generations))
    used, other = (triton, second) if triton.generations else (second, triton)
    other.default = words("other")
    await client.admin.DrainReplica(pb.DrainReplicaRequest(address=used.target, move=True))
    outcome = await running
    assert (outcome.text, outcome.finished.resumes) == ("other", 1)
    await used.wait_for(lambda: used.stops == [used.generations[0].id])
    assert (await client.replicas())[used.target].resumes == 1


@pytest.mark.parametrize("name", ["DrainReplica", "UndrainReplica"])
@pytest.mark.parametrize("address", ["", "10.0.0.1:1"])
async def test_an_unknown_replica_is_refused_by_name(
    client: Client, name: str, address: str
) -> None:
    call = getattr(client.admin, name)(getattr(pb, f"{name}Request")(address=address))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith(f"address: got {address!r}, allowed: one of")


async def test_a_gateway_that_drains_finishes_what_it_has(
    client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    slow = [Step({"output_ids": [n], "text_output": f"{n} "}, delay_s=0.02) for n in range(20)]
    triton.default = second.default = Script(slow)
    running = asyncio.create_task(client.generate(prompt="Hi"))
    await triton.wait_for(lambda: bool(triton.generations or second.generations))
    assert (await client.admin.Drain(pb.DrainRequest())).generations == 1
    await client.wait_serving(False)
    refused = await client.generate(prompt="Hi")
    assert refused.code is grpc.StatusCode.UNAVAILABLE
    assert refused.message == "the server is shutting down"
    assert (await running).text == "".join(f"{n} " for n in range(20))
    assert (await client.admin.Drain(pb.DrainRequest())).generations == 0


async def test_the_log_level_is_set(client: Client) -> None:
    logger = logging.getLogger("draftgate")
    before = logger.level
    try:
        logger.setLevel(logging.WARNING)
        for level, number, previous in (
            (pb.LOG_LEVEL_DEBUG, logging.DEBUG, pb.LOG_LEVEL_WARNING),
            (pb.LOG_LEVEL_ERROR, logging.ERROR, pb.LOG_LEVEL_DEBUG),
            (pb.LOG_LEVEL_INFO, logging.INFO, pb.LOG_LEVEL_ERROR),
        ):
            answer = await client.admin.SetLogLevel(pb.SetLogLevelRequest(level=level))
            assert (logger.level, answer.previous) == (number, previous)
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("level", [0, 9])
async def test_a_log_level_that_is_none_is_refused(client: Client, level: int) -> None:
    request = pb.SetLogLevelRequest()
    request.level = level  # type: ignore[assignment]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client.admin.SetLogLevel(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == (
        f"level: got {level}, allowed: one of LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARNING, "
        "LOG_LEVEL_ERROR"
    )


async def test_the_gate_of_a_named_replica_is_meant(
    client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.gate.state["draft_len"], second.gate.state["draft_len"] = 1, 3

    async def draft_len(replica: str) -> int:
        answer = await client.gate.GetState(gate_pb2.GetStateRequest(replica=replica))
        return int(answer.state.draft_len)

    assert [await draft_len(each) for each in (triton.target, second.target, "")] == [1, 3, 1]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await draft_len("10.0.0.1:1")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("replica: got '10.0.0.1:1', allowed: one of")
