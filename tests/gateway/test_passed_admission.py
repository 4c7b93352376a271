"""Clients that speak Triton's own protocol, in front of a full server."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.auth import SecurityConfig
from draftgate.gateway.passed_stream import StreamSettings
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import Client, Outcome, connected, running_gateway
from tests.support.passing import final, request, rest, stop, stream
from tests.support.tenants import TenantsFile

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)
STATUS_MODE = (("triton_grpc_error", "true"),)
FULL = "the server is full: 1 generations run and 0 wait, allowed: at most 0"


@asynccontextmanager
async def serving(
    triton: FakeTriton, **config: Any
) -> AsyncIterator[tuple[Client, GRPCInferenceServiceStub]]:
    fields = {"max_concurrency": 1} | config
    async with (
        running_gateway(triton.target, admission=AdmissionConfig(**fields)) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client, GRPCInferenceServiceStub(client.channel)


@asynccontextmanager
async def occupied(stub: GRPCInferenceServiceStub, triton: FakeTriton) -> AsyncIterator[None]:
    """The only place is taken, inside, by another client's request."""
    triton.scripts.append(ENDLESS)
    call = stub.ModelStreamInfer()
    await call.write(request(request_id="occupies"))
    await call.read()
    try:
        yield
    finally:
        call.cancel()


def started(triton: FakeTriton) -> list[str]:
    """The clients' ids of what reached the server, in its order, but for the occupying one."""
    ids = [each.id.rpartition("-")[0] for each in triton.generations]
    return [each for each in ids if each != "occupies"]


def infer(stub: GRPCInferenceServiceStub, timeout_s: float = 20.0) -> Any:
    """A call of a model that gives one response."""
    return stub.ModelInfer(request(model="preprocessing", max_tokens=None), timeout=timeout_s)


def retry_info(error: grpc.aio.AioRpcError) -> error_details_pb2.RetryInfo:
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in Outcome(error=error).details)
    return retry


async def test_a_full_server_refuses_in_band(triton: FakeTriton) -> None:
    async with serving(triton, max_waiting=0) as (_, stub), occupied(stub, triton):
        found = await stream(stub, request(request_id="a"), request(request_id="b"))
    assert found.error is None
    assert found.errors == {"a": FULL, "b": FULL}
    assert started(triton) == []


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_full_server_refuses_with_the_status(triton: FakeTriton, streamed: bool) -> None:
    async with serving(triton, max_waiting=0) as (_, stub), occupied(stub, triton):
        if streamed:
            error = (await stream(stub, request(), metadata=STATUS_MODE)).error
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(stub)
            error = caught.value
    assert error is not None
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, FULL)
    assert retry_info(error).retry_delay.ToMilliseconds() == 1000
    assert (started(triton), triton.inferred) == ([], [])


async def test_waiting_requests_start_in_their_turn(triton: FakeTriton) -> None:
    async with serving(triton) as (client, stub):
        async with occupied(stub, triton):
            passed = asyncio.create_task(stream(stub, request(request_id="a")))
            await asyncio.sleep(0.05)
            own = asyncio.create_task(client.generate(prompt="Hi", request_id="b"))
            await asyncio.sleep(0.05)
            unary = infer(stub)
            await asyncio.sleep(0.05)
            assert (started(triton), triton.inferred) == ([], [])
        assert (await passed).text("a") == "Hello world"
        assert (await own).text == "Hello world"
        assert (await unary).id == "1"
        assert started(triton) == ["a", "b"]


async def test_others_of_the_stream_go_on_while_one_waits(triton: FakeTriton) -> None:
    async with serving(triton) as (_, stub):
        triton.scripts = [ENDLESS]
        call = stub.ModelStreamInfer()
        await call.write(request(request_id="runs"))
        await call.read()
        await call.write(request(request_id="waits"))
        await call.write(request(request_id="unknown", model="nowhere"))
        for _ in range(3):
            response = await call.read()
            assert isinstance(response, pb.ModelStreamInferResponse)
            assert response.infer_response.id == "runs"
        # A stop needs no place, and is read behind requests that wait for one.
        await call.write(stop("runs"))
        await call.done_writing()
        found = await rest(call)
    assert found.error is None
    assert found.text("waits") == "Hello world"
    assert found.errors == {"unknown": "Request for unknown model: 'nowhere' is not found"}
    assert started(triton) == ["runs", "waits"]


@pytest.mark.parametrize("metadata", [(), STATUS_MODE])
async def test_a_waiting_request_may_be_stopped(triton: FakeTriton, metadata: Any) -> None:
    async with serving(triton) as (_, stub), occupied(stub, triton):
        call = stub.ModelStreamInfer(metadata=metadata)
        await call.write(request(request_id="waits"))
        await call.write(stop("waits"))
        await call.done_writing()
        found = await rest(call)
        assert found.error is None
        assert [each.infer_response.id for each in found.responses] == ["waits"] * 2
        assert [each.infer_response.model_name for each in found.responses] == [
            "ensemble",
            "engine",
        ]
        assert all(final(each) and not each.error_message for each in found.responses)
        assert (started(triton), triton.stops) == ([], [])


async def test_a_client_that_leaves_frees_its_waiting_places(triton: FakeTriton) -> None:
    async with serving(triton, max_waiting=2) as (_, stub), occupied(stub, triton):
        call = stub.ModelStreamInfer()
        for request_id in ("a", "b", "c"):
            await call.write(request(request_id=request_id))
        response = await call.read()
        assert isinstance(response, pb.ModelStreamInferResponse)
        assert response.infer_response.id == "c"
        assert response.error_message.startswith("the server is full")
        call.cancel()
        await asyncio.sleep(0.05)
        others = stub.ModelStreamInfer()
        for request_id in ("d", "e"):
            await others.write(request(request_id=request_id))
        with pytest.raises(TimeoutError):  # Both wait.
            await asyncio.wait_for(others.read(), 0.2)
        others.cancel()
    assert started(triton) == []


async def test_priority_decides_who_is_next(triton: FakeTriton) -> None:
    async with serving(triton) as (_, stub):
        async with occupied(stub, triton):
            call = stub.ModelStreamInfer()
            for request_id, priority in (("late", 2), ("first", 1), ("usual", 0)):
                await call.write(request(request_id=request_id, priority=priority))
            await call.done_writing()
            await asyncio.sleep(0.1)
        assert (await rest(call)).error is None
    assert started(triton) == ["first", "usual", "late"]
    assert [each.parameters.get("priority") for each in triton.generations[1:]] == [1, 0, 2]


async def test_a_request_waits_no_longer_than_its_timeout(triton: FakeTriton) -> None:
    async with serving(triton) as (_, stub), occupied(stub, triton):
        found = await stream(stub, request(timeout=150_000))
    assert found.errors == {
        "1": "timeout: the request waited 0.15 s, the most that it allows, and did not start"
    }
    assert started(triton) == []


async def test_triton_is_told_what_the_wait_left_of_the_timeout(triton: FakeTriton) -> None:
    async with serving(triton) as (_, stub):
        async with occupied(stub, triton):
            waiting = asyncio.create_task(stream(stub, request(timeout=30_000_000)))
            await asyncio.sleep(0.5)
        assert (await waiting).text() == "Hello world"
        assert triton.generations[-1].parameters["timeout"] <= 29_600_000
        assert (await stream(stub, request(timeout=30_000_000))).error is None
        assert triton.generations[-1].parameters["timeout"] == 30_000_000


async def test_what_cannot_start_in_time_is_refused_at_once(triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.3)])
    async with serving(triton) as (_, stub):
        for _ in range(4):
            assert (await stream(stub, request())).error is None
        async with occupied(stub, triton):
            found = await stream(stub, request(timeout=1000))
            assert "after its deadline" in found.errors["1"]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await infer(stub, timeout_s=0.05)
            assert caught.value.code() in (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.DEADLINE_EXCEEDED,  # On a slow machine it comes too late for that.
            )


async def test_a_drain_turns_away_who_waits(triton: FakeTriton) -> None:
    async with (
        running_gateway(triton.target, admission=AdmissionConfig(max_concurrency=1)) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        stub = GRPCInferenceServiceStub(client.channel)
        async with occupied(stub, triton):
            waiting = asyncio.create_task(stream(stub, request()))
            await asyncio.sleep(0.05)
            draining = asyncio.create_task(gateway.drain(20))
            assert (await waiting).errors == {"1": "the server is shutting down"}
        await draining


async def test_a_stream_runs_and_waits_for_so_many_at_most(triton: FakeTriton) -> None:
    most = StreamSettings().max_running
    async with serving(triton, max_waiting=2 * most, max_wait_s=3600.0) as (_, stub):
        async with occupied(stub, triton):
            call = stub.ModelStreamInfer()
            for number in range(most + 1):
                await call.write(request(request_id=f"r{number}"))
            await call.write(stop("r0"))
            await call.done_writing()
            reading = asyncio.create_task(rest(call))
            await asyncio.sleep(0.5)
            assert triton.stops == []  # It is not even read.
        found = await reading
        assert (found.error, found.errors) == (None, {})
        assert len(started(triton)) == most + 1


async def test_calls_that_infer_nothing_need_no_place(triton: FakeTriton) -> None:
    async with serving(triton, max_waiting=0) as (_, stub), occupied(stub, triton):
        assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
        assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "triton"
        assert (await stub.ModelReady(pb.ModelReadyRequest(name="ensemble"))).ready
        assert (await stub.ModelConfig(pb.ModelConfigRequest(name="engine"))).config.name
        assert await stub.ModelStatistics(pb.ModelStatisticsRequest()) is not None


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsFile:
    return TenantsFile(tmp_path / "tenants.yaml")


@asynccontextmanager
async def secured(
    triton: FakeTriton, tenants: TenantsFile
) -> AsyncIterator[GRPCInferenceServiceStub]:
    security = SecurityConfig(tenants_file=tenants.path)
    async with (
        running_gateway(triton.target, security=security) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield GRPCInferenceServiceStub(client.channel)


async def test_a_tenants_limits_hold(triton: FakeTriton, tenants: TenantsFile) -> None:
    key = tenants.add("acme", max_concurrency=1, max_prompt_tokens=10, tokens_per_minute=100)
    metadata = [("authorization", f"Bearer {key}")]
    triton.default = Script([Step({"output_ids": [1, 2, 3]}, delay_s=0.2)])
    async with secured(triton, tenants) as stub:
        assert (await stream(stub, request())).error is not None  # Nobody.
        found = await stream(
            stub,
            request("x" * 41, "long"),
            request(request_id="many", max_tokens=400),
            request(request_id="fine", max_tokens=60),
            request(request_id="second"),
            metadata=metadata,
        )
        assert found.errors.keys() == {"long", "many", "second"}
        assert found.errors["long"].startswith("text_input: got '11 tokens', allowed: at most 10")
        assert found.errors["many"].startswith("max_tokens: got 400, allowed: at most 100 tokens")
        assert found.errors["second"].startswith("tenant 'acme' has 1 generations running")
        # Of 61 tokens that it might have taken it took 4: the rest is given back.
        found = await stream(stub, request(max_tokens=90), metadata=metadata)
        assert found.errors == {}
        assert len(triton.generations) == 2


def ids_request(count: int) -> Any:
    made = pb.ModelInferRequest(model_name="ensemble", id="ids")
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.inputs.add(name="input_ids", datatype="INT32", shape=[count])
    made.raw_input_contents.append(struct.pack(f"<{count}i", *range(count)))
    made.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
    made.raw_input_contents.append(struct.pack("<i", 5))
    return made


async def test_ids_are_counted_as_they_are(triton: FakeTriton, tenants: TenantsFile) -> None:
    key = tenants.add("acme", max_prompt_tokens=10)
    metadata = [("authorization", f"Bearer {key}")]
    async with secured(triton, tenants) as stub:
        assert (await stream(stub, ids_request(10), metadata=metadata)).errors == {}
        errors = (await stream(stub, ids_request(11), metadata=metadata)).errors
        assert errors["ids"].startswith("input_ids: got '11 tokens', allowed: at most 10 tokens")
