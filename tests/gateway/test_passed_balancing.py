"""Clients that speak Triton's own protocol, in front of several replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import admin_pb2
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from draftgate.gateway.passed_request import SequenceStep
from draftgate.gateway.sequences import Sequences
from draftgate.upstream.breaker import BreakerLimits
from draftgate.upstream.replica import ReplicaLimits
from draftgate.upstream.replicas import ReplicaSetConfig
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import Client, connected, running_gateway
from tests.support.passing import request, rest, stream

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)
SILENT = Script([Step(delay_s=3600.0)])
LOST = Script(status=grpc.StatusCode.UNAVAILABLE, details="Socket closed")
LIMITS = ReplicaLimits(
    stall_s=0.5,
    first_chunk_stall_s=0.5,
    slow_start_s=0.0,
    breaker=BreakerLimits(failures=100),
)
STATUS_MODE = (("triton_grpc_error", "true"),)


@pytest.fixture
async def client(triton: FakeTriton, second: FakeTriton) -> AsyncIterator[Client]:
    """Of a gateway with two replicas, both ready."""
    config = ReplicaSetConfig(affinity_tokens=100, limits=LIMITS)
    async with (
        running_gateway(f"{triton.target},{second.target}", replicas=config) as gateway,
        connected(gateway) as found,
    ):
        await found.wait_all_ready()
        yield found


@pytest.fixture
def stub(client: Client) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(client.channel)


async def begun(tritons: list[FakeTriton], count: int) -> None:
    await tritons[0].wait_for(lambda: sum(len(each.generations) for each in tritons) == count)


async def test_the_requests_of_one_stream_are_split(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = ENDLESS
    call = stub.ModelStreamInfer()
    for number in range(6):
        await call.write(request(f"prompt {number}", f"r{number}", max_tokens=300))
    await begun([triton, second], 6)
    assert [len(each.generations) for each in (triton, second)] == [3, 3]
    replicas = (await client.replicas()).values()
    assert [each.generations for each in replicas] == [3, 3]
    assert all(0 < each.outstanding_tokens <= 3 * 303 for each in replicas)
    call.cancel()
    for each in (triton, second):
        await each.wait_for(lambda each=each: len(each.stops) == 3)
    assert all(not each.generations for each in (await client.replicas()).values())


async def test_the_same_prefix_goes_where_it_went_before(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    for _ in range(3):
        assert (await stream(stub, request("the same"))).text() == "Hello world"
    assert (await client.generate(prompt="the same")).error is None
    assert sorted(len(each.generations) for each in (triton, second)) == [0, 4]


async def test_calls_with_one_response_are_split_too(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.infer_script = second.infer_script = Script([Step(delay_s=0.3)])
    calls = [
        stub.ModelInfer(request(f"{number}" * 500, model="preprocessing", max_tokens=None))
        for number in range(6)
    ]
    for call in calls:
        await call
    assert [len(each.inferred) for each in (triton, second)] == [3, 3]


async def test_a_drained_replica_gets_nothing_new(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = ENDLESS
    second.default = words("second")
    await client.admin.DrainReplica(admin_pb2.DrainReplicaRequest(address=second.target))
    running = stub.ModelStreamInfer()
    await running.write(request())
    await running.read()
    await client.admin.UndrainReplica(admin_pb2.UndrainReplicaRequest(address=second.target))
    drain = admin_pb2.DrainReplicaRequest(address=triton.target, move=True)
    await client.admin.DrainReplica(drain)
    for number in range(4):
        assert (await stream(stub, request(f"prompt {number}"))).text() == "second"
    # What began cannot go on elsewhere, so it ends where it is.
    assert isinstance(await running.read(), pb.ModelStreamInferResponse)
    assert triton.generations[0].ended == ""
    running.cancel()


@pytest.mark.parametrize(
    "failing",
    [
        LOST,
        Script(status=grpc.StatusCode.INTERNAL, details="Received RST_STREAM with error code 2"),
        Script(in_band_error="Failed to process: Stub process 'engine_0' is not healthy"),
        Script(in_band_error=to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "going"))),
    ],
)
async def test_a_replica_lost_before_it_answered_is_not_noticed(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton, failing: Script
) -> None:
    scripts = [failing, words("fine")]
    triton.script_for = second.script_for = lambda received: scripts.pop(0)
    found = await stream(stub, request())
    assert (found.text(), found.errors, found.error) == ("fine", {}, None)
    assert [len(each.generations) for each in (triton, second)] == [1, 1]


async def test_a_lost_call_with_one_response_is_not_noticed(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.infer_script = LOST
    number = 0
    while not triton.inferred:  # Which one it is depends on the prompt.
        asked = request(f"prompt {number}", model="preprocessing", max_tokens=None)
        assert (await stub.ModelInfer(asked)).id == "1"
        number += 1
    assert len(second.inferred) == number


@pytest.mark.parametrize("metadata", [(), STATUS_MODE])
async def test_with_all_replicas_lost_the_failure_is_told(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton, metadata: Any
) -> None:
    triton.default = second.default = LOST
    found = await stream(stub, request(), metadata=metadata)
    assert [len(each.generations) for each in (triton, second)] == [1, 1]
    if metadata:
        assert found.error is not None
        assert found.error.code() is grpc.StatusCode.UNAVAILABLE
    else:
        assert found.errors == {"1": "the model server cannot be reached"}


@pytest.mark.parametrize(
    "failing",
    [
        Script(status=grpc.StatusCode.UNAVAILABLE, details="Exceeds maximum queue size"),
        Script(status=grpc.StatusCode.INVALID_ARGUMENT, details="Socket closed"),
        Script(in_band_error="Exceeds maximum queue size"),
    ],
)
async def test_what_a_replica_refuses_is_asked_of_no_other(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton, failing: Script
) -> None:
    triton.default = second.default = failing
    found = await stream(stub, request())
    assert found.errors == {"1": failing.details or failing.in_band_error}
    assert len(triton.generations) + len(second.generations) == 1


async def test_a_replica_lost_after_it_answered_is_told(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = replace(LOST, steps=words("a").steps)
    found = await stream(stub, request())
    assert (found.text(), found.errors) == ("a", {"1": "the model server cannot be reached"})
    assert len(triton.generations) + len(second.generations) == 1


async def test_a_replica_that_emits_nothing_is_left(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = SILENT
    call = stub.ModelStreamInfer()
    await call.write(request())
    await call.done_writing()
    await begun([triton, second], 1)
    stuck, other = (triton, second) if triton.generations else (second, triton)
    other.default = words("other")
    assert (await rest(call)).text() == "other"
    await stuck.wait_for(lambda: stuck.generations[0].ended == "stopped")


async def test_the_server_is_ready_if_one_replica_is(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    await triton.stop()
    # Also before the gateway has noticed.
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "triton"
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    second.server_ready = False
    async with asyncio.timeout(20):
        while (await stub.ServerReady(pb.ServerReadyRequest())).ready:
            await asyncio.sleep(0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelStatistics(pb.ModelStatisticsRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_statistics_are_those_of_all_replicas(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    def model(name: str, count: int, last: int) -> pb.ModelStatistics:
        made = pb.ModelStatistics(
            name=name, version="1", last_inference=last, inference_count=count
        )
        made.inference_stats.success.count = count
        made.inference_stats.success.ns = 10 * count
        made.batch_stats.add(batch_size=count).compute_infer.count = count
        made.batch_stats.add(batch_size=8).compute_infer.count = 1
        made.response_stats["0"].success.count = count
        return made

    triton.statistics.model_stats.extend([model("engine", 2, 50), model("ensemble", 1, 1)])
    second.statistics.model_stats.append(model("engine", 3, 40))
    found = await stub.ModelStatistics(pb.ModelStatisticsRequest())
    engine, ensemble = found.model_stats
    assert ensemble == triton.statistics.model_stats[1]
    assert (engine.inference_count, engine.last_inference) == (5, 50)
    assert (engine.inference_stats.success.count, engine.inference_stats.success.ns) == (5, 50)
    batches = {each.batch_size: each.compute_infer.count for each in engine.batch_stats}
    assert batches == {2: 2, 3: 3, 8: 2}
    assert engine.response_stats["0"].success.count == 5
    second.server_ready = False
    async with asyncio.timeout(20):
        while (await client.replicas())[second.target].state == admin_pb2.REPLICA_STATE_READY:
            await asyncio.sleep(0.01)
    assert await stub.ModelStatistics(pb.ModelStatisticsRequest()) == triton.statistics


@pytest.mark.parametrize("sequence_id", [7, "seven"])
async def test_a_sequence_stays_where_it_began_in_its_order(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton, sequence_id: Any
) -> None:
    slow_first = [0.2, 0.1, 0.0, 0.0, 0.0, 0.0]
    triton.scripts = [Script([Step({"text_output": "x"}, delay_s=each)]) for each in slow_first]
    second.scripts = list(triton.scripts)
    parts = [
        request(
            f"part {number}",
            f"r{number}",
            sequence_id=sequence_id,
            sequence_start=number == 0,
            sequence_end=number == 5,
        )
        for number in range(6)
    ]
    found = await stream(stub, *parts[:3])
    found.responses += (await stream(stub, *parts[3:])).responses
    assert found.errors == {}
    used, unused = (triton, second) if triton.generations else (second, triton)
    assert not unused.generations
    assert [each.tensors["text_input"] for each in used.generations] == [
        f"part {number}" for number in range(6)
    ]
    assert [each.infer_response.id for each in found.responses if each.infer_response.outputs] == [
        f"r{number}" for number in range(6)
    ]


async def test_sequences_are_split_over_replicas(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = Script([Step({"text_output": "x"}, delay_s=0.2)])
    starts = [
        request(f"p{n}", sequence_id=n, sequence_start=True, max_tokens=300) for n in range(1, 7)
    ]
    assert (await stream(stub, *starts)).errors == {}
    assert [len(each.generations) for each in (triton, second)] == [3, 3]


async def test_a_sequence_is_lost_with_its_replica(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    assert (await stream(stub, request(sequence_id=7, sequence_start=True))).errors == {}
    used, other = (triton, second) if triton.generations else (second, triton)
    # A drained one finishes what it has.
    await client.admin.DrainReplica(admin_pb2.DrainReplicaRequest(address=used.target))
    assert (await stream(stub, request(sequence_id=7))).errors == {}
    assert len(used.generations) == 2
    used.server_ready = False
    async with asyncio.timeout(20):
        while not (await client.replicas())[used.target].reason:
            await asyncio.sleep(0.01)
    assert (await stream(stub, request(sequence_id=7))).errors == {
        "1": "sequence_id: the model server that has sequence 7 is not ready"
    }
    found = await stream(stub, request(sequence_id=7, sequence_start=True, sequence_end=True))
    assert found.errors == {}
    assert len(other.generations) == 1


async def test_a_request_of_a_sequence_is_asked_of_no_other_replica(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = LOST
    found = await stream(stub, request(sequence_id=7, sequence_start=True))
    assert found.errors == {"1": "the model server cannot be reached"}
    assert len(triton.generations) + len(second.generations) == 1


async def test_a_sequence_is_not_moved(
    stub: GRPCInferenceServiceStub, client: Client, triton: FakeTriton, second: FakeTriton
) -> None:
    triton.default = second.default = Script([Step({"text_output": "x"}, delay_s=0.3)])
    running = asyncio.create_task(stream(stub, request(sequence_id=7, sequence_start=True)))
    await begun([triton, second], 1)
    used = triton if triton.generations else second
    drain = admin_pb2.DrainReplicaRequest(address=used.target, move=True)
    await client.admin.DrainReplica(drain)
    found = await running
    assert (found.text(), found.errors) == ("x", {})
    assert [each.ended for each in used.generations] == ["finished"]


async def test_sequences_that_never_end_are_forgotten() -> None:
    sequences = Sequences(most=2)

    async def ask(number: int, *, end: bool = False) -> object:
        step = SequenceStep(("acme", "model", number), start=False, end=end)
        async with sequences.turn(step) as turn:
            before, turn.replica = turn.replica, kept
            return before

    kept: Any = object()
    for number in (1, 2, 1, 3):
        await ask(number)
    assert len(sequences) == 2
    assert await ask(1) is kept
    assert await ask(2) is None
    assert await ask(2, end=True) is kept
    assert await ask(2) is None
