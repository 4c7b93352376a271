"""Clients that speak Triton's own protocol, on the gateway's port."""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from draftgate.gateway import Gateway
from draftgate.upstream.buffer import BufferLimits
from draftgate.upstream.raw import Told, failure_response, final_response, told_by
from tests.fakes.triton import FakeTriton, Received, Script, Step, words
from tests.support.gateway import Client, connected, running_gateway
from tests.support.passing import Streamed, engine_request, request, stream

SERVICE = "/inference.GRPCInferenceService"
ENDLESS = Script([Step({"output_ids": [1], "text_output": "x"}, delay_s=0.005)], endless=True)
NARROW = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))
STATUS_MODE = (("triton_grpc_error", "true"),)


@pytest.fixture
def stub(client: Client) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(client.channel)


@pytest.fixture
async def direct(triton: FakeTriton) -> AsyncIterator[GRPCInferenceServiceStub]:
    """Past the gateway."""
    async with grpc.aio.insecure_channel(triton.target) as channel:
        yield GRPCInferenceServiceStub(channel)


async def test_calls_without_inference_are_passed_on(
    stub: GRPCInferenceServiceStub, direct: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    for each in (stub, direct):
        assert (await each.ServerLive(pb.ServerLiveRequest())).live
        assert (await each.ServerReady(pb.ServerReadyRequest())).ready
        assert (await each.ServerMetadata(pb.ServerMetadataRequest())).version == "2.51.0"
        assert (await each.ModelReady(pb.ModelReadyRequest(name="ensemble"))).ready
    asked = pb.ModelConfigRequest(name="engine")
    assert await stub.ModelConfig(asked) == await direct.ModelConfig(asked)


async def test_a_refusal_keeps_tritons_code_and_words(stub: GRPCInferenceServiceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelConfig(pb.ModelConfigRequest(name="nowhere"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "Request for unknown model: 'nowhere' is not found"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(request())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "decoupled" in (caught.value.details() or "")


@pytest.mark.parametrize(
    "method",
    [
        *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting"),
        *("LogSettings", "SystemSharedMemoryRegister", "CudaSharedMemoryStatus"),
    ],
)
async def test_what_changes_the_server_is_not_there(client: Client, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.channel.unary_unary(f"{SERVICE}/{method}")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("request_id", ["1", "", "Grüße " * 40])
async def test_responses_are_tritons_under_the_callers_id(
    stub: GRPCInferenceServiceStub,
    direct: GRPCInferenceServiceStub,
    triton: FakeTriton,
    request_id: str,
) -> None:
    found = await stream(stub, request(request_id=request_id))
    assert found.error is None
    assert found.text(request_id) == "Hello world"
    (received,) = triton.generations
    assert received.id.startswith(request_id)
    assert received.id != request_id
    expected = await stream(direct, request(request_id=request_id or "x"))
    for response in expected.responses:
        response.infer_response.id = request_id
    assert found.responses == expected.responses
    assert triton.stops == []


async def test_requests_of_one_stream_run_at_once(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    def script(received: Received) -> Script:
        return ENDLESS if received.tensors["text_input"] == "long" else words("short")

    triton.script_for = script
    call = stub.ModelStreamInfer()
    await call.write(request("long", "a"))
    await call.write(request("short", "b"))
    seen: list[str] = []
    while "b" not in seen or seen.count("a") < 3:
        response = await call.read()
        assert isinstance(response, pb.ModelStreamInferResponse)
        seen.append(response.infer_response.id)
    assert len(triton.generations) == 2
    call.cancel()
    long = next(each for each in triton.generations if each.tensors["text_input"] == "long")
    await triton.wait_for(lambda: long.ended == "stopped")
    assert triton.stops == [long.id]


async def test_requests_may_share_an_id(stub: GRPCInferenceServiceStub, triton: FakeTriton) -> None:
    found = await stream(stub, request(), request())
    assert found.error is None
    finals = [each.infer_response.parameters["triton_final_response"] for each in found.responses]
    assert sum(final.bool_param for final in finals) == 2
    assert len({each.id for each in triton.generations}) == 2


async def test_a_request_that_fails_leaves_the_others_alone(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    found = await stream(stub, request(request_id="a", model="nowhere"), request(request_id="b"))
    assert found.error is None
    (failed,) = [each for each in found.responses if each.error_message]
    assert failed.infer_response.id == "a"
    assert failed.error_message == "Request for unknown model: 'nowhere' is not found"
    assert found.text("b") == "Hello world"


async def test_a_failed_rpc_is_told_in_band(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    triton.scripts = [Script(words("a").steps, status=grpc.StatusCode.INTERNAL, details="it broke")]
    found = await stream(stub, request())
    assert found.error is None
    assert found.text() == "a"
    assert found.responses[-1].error_message == "it broke"
    assert found.responses[-1].infer_response.id == "1"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (
            Script(in_band_error=to_wire(DraftgateError(ErrorCode.RESOURCE_EXHAUSTED, "full"))),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ),
        (Script(in_band_error="something odd"), grpc.StatusCode.INTERNAL),
        (
            Script(in_band_error="unexpected shape for input 'seed' for model 'ensemble'"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            Script(status=grpc.StatusCode.INVALID_ARGUMENT, details="wrong"),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_failures_are_the_status_if_the_client_wants_it(
    stub: GRPCInferenceServiceStub, triton: FakeTriton, script: Script, code: grpc.StatusCode
) -> None:
    triton.script_for = lambda received: (
        script if received.tensors["text_input"] == "fails" else ENDLESS
    )
    call = stub.ModelStreamInfer(metadata=STATUS_MODE)
    await call.write(request("runs", "a"))
    await call.read()
    await call.write(request("fails", "b"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012  # some may be on the way
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError("the stream ended well")
    assert caught.value.code() is code
    running = next(each for each in triton.generations if each.tensors["text_input"] == "runs")
    await triton.wait_for(lambda: running.ended == "stopped")
    # The status is the gateway's doing: Triton was not asked for it.
    assert "triton_grpc_error" not in running.metadata


async def test_a_client_may_stop_its_own_generation(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    call = stub.ModelStreamInfer()
    await call.write(request(request_id="mine"))
    await call.read()
    await call.write(engine_request("mine", contract.STOP, "BOOL", b"\1"))
    await call.done_writing()
    while (response := await call.read()) is not grpc.aio.EOF:
        assert isinstance(response, pb.ModelStreamInferResponse)
        assert response.infer_response.id == "mine"
    assert triton.stops == [triton.generations[0].id]
    assert triton.generations[0].ended == "stopped"


async def test_the_control_plane_is_closed(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    asked = json.dumps({"op": "describe"}).encode()
    content = struct.pack("<I", len(asked)) + asked
    found = await stream(stub, engine_request("1", contract.CONTROL, "BYTES", content))
    (response,) = found.responses
    assert response.error_message.startswith("control: not open to this protocol")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(engine_request("1", contract.CONTROL, "BYTES", content))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["ModelConfig", "ModelInfer", "ModelStreamInfer"])
async def test_malformed_bytes_are_refused(client: Client, method: str) -> None:
    async def ask() -> None:
        if method != "ModelStreamInfer":
            await client.channel.unary_unary(f"{SERVICE}/{method}")(b"\x0a\xff")
        call = client.channel.stream_stream(f"{SERVICE}/{method}")()
        await call.write(b"\x0a\xff")
        await call.read()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_deadline_stops_what_runs(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    call = stub.ModelStreamInfer(timeout=0.3)
    await call.write(request())
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012  # some come before
        while await call.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await triton.wait_for(lambda: triton.generations[0].ended == "stopped")


async def test_a_slow_reader_loses_its_stream(triton: FakeTriton) -> None:
    flood = Script([Step({"output_ids": [1], "text_output": "x" * 65536})], endless=True)
    triton.script_for = lambda received: (
        flood if received.tensors["text_input"] == "flood" else words("ok")
    )
    async with (
        running_gateway(
            triton.target, stream_limits=BufferLimits(max_chunks=50), write_timeout_s=30.0
        ) as gateway,
        connected(gateway, *NARROW) as slow,
        connected(gateway) as other,
    ):
        await other.wait_serving()
        call = GRPCInferenceServiceStub(slow.channel).ModelStreamInfer()
        await call.write(request("flood"))
        await call.read()
        await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])
        found = await stream(GRPCInferenceServiceStub(other.channel), request())
        assert found.text() == "ok"
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012  # some come before
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read too slowly" in (caught.value.details() or "")


async def test_a_drain_ends_idle_streams_and_lets_running_requests_finish(
    stub: GRPCInferenceServiceStub, gateway: Gateway, triton: FakeTriton
) -> None:
    triton.default = Script([Step(step.values, 0.2) for step in words("a", "b", "c").steps])
    idle, running = stub.ModelStreamInfer(), stub.ModelStreamInfer()
    await idle.write(request(model="nowhere"))
    await idle.read()
    await running.write(request())
    await triton.wait_for(lambda: bool(triton.generations))
    draining = asyncio.create_task(gateway.drain(10.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await idle.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await running.write(request(request_id="late"))
    await running.done_writing()
    found = Streamed([response async for response in running])
    assert found.text() == "abc"
    (late,) = [each for each in found.responses if each.infer_response.id == "late"]
    assert late.error_message == "the server is shutting down"
    await draining


async def test_a_drain_cuts_what_does_not_end(
    stub: GRPCInferenceServiceStub, gateway: Gateway, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    call = stub.ModelStreamInfer()
    await call.write(request())
    await call.read()
    draining = asyncio.create_task(gateway.drain(0.1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012  # some may be on the way
        while await call.read() is not grpc.aio.EOF:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await draining
    assert triton.stops == [triton.generations[0].id]


async def test_triton_is_gone(stub: GRPCInferenceServiceStub, triton: FakeTriton) -> None:
    await triton.stop()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ServerMetadata(pb.ServerMetadataRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "the model server cannot be reached"
    (response,) = (await stream(stub, request())).responses
    assert response.error_message == "the model server cannot be reached"
    while (await stub.ServerReady(pb.ServerReadyRequest())).ready:
        await asyncio.sleep(0.01)
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live


async def test_one_request_with_one_response(
    stub: GRPCInferenceServiceStub, triton: FakeTriton
) -> None:
    answer = await stub.ModelInfer(request("Hi", model="preprocessing", max_tokens=None))
    assert answer.id == "1"
    assert list(struct.unpack("<2i", answer.raw_output_contents[0])) == list(b"Hi")
    (received,) = triton.inferred
    assert received.id == "1"


async def test_nvidias_own_client_streams(gateway: Gateway, client: Client) -> None:
    example = Path(__file__).parents[2] / "examples" / "triton_client.py"
    command = [sys.executable, str(example), "--target", f"127.0.0.1:{gateway.port}"]
    command += ["--prompt", "Hi"]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"Hello world\n", b"")


@given(st.text(), st.text(min_size=1), st.lists(st.integers(0, 9)))
def test_what_responses_tell_is_found(request_id: str, message: str, ids: list[int]) -> None:
    assert told_by(failure_response(request_id, message)) == Told(message, 0)
    assert told_by(final_response(request_id, "engine")) == Told("", 0)
    fine = pb.ModelStreamInferResponse()
    fine.infer_response.id = request_id
    fine.infer_response.raw_output_contents.append(message.encode())
    fine.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    assert told_by(fine.SerializeToString()) == Told("", 1)
    fine.infer_response.outputs.add(name="output_ids", datatype="INT32", shape=[len(ids)])
    assert told_by(fine.SerializeToString()) == Told("", len(ids))
    assert told_by(b"\xff" + message.encode()) == Told("", 0)
