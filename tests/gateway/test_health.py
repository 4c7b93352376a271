"""Health follows Triton, for everybody who asks or watches."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from draftgate import contract
from draftgate.gateway import Gateway
from draftgate.upstream import replica
from draftgate.upstream.client import TritonClient
from tests.fakes.triton import FakeTriton
from tests.support.gateway import Client, connected, running_gateway

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "draftgate.v1.GenerationService", "draftgate.v1.ModelService")


@pytest.mark.parametrize(
    "model",
    [
        contract.ENSEMBLE_MODEL,
        contract.PREPROCESSING_MODEL,
        contract.ENGINE_MODEL,
        contract.POSTPROCESSING_MODEL,
    ],
)
async def test_one_model_not_ready_is_not_serving(
    client: Client, triton: FakeTriton, model: str
) -> None:
    triton.not_ready_models = {model}
    await client.wait_serving(False)
    outcome = await client.generate(prompt="Hi")
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert model in outcome.message
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get_model()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    triton.not_ready_models = set()
    await client.wait_serving()
    assert (await client.generate(prompt="Hi")).text == "Hello world"


async def test_every_service_has_its_status(client: Client) -> None:
    for service in SERVICES:
        assert await client.status(service) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.status("draftgate.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_name_of_any_length_is_not_found(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.status("x" * 100_000)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(caught.value.details() or "") < 100


async def test_watchers_see_triton_go_and_come_back(
    gateway: Gateway, client: Client, triton: FakeTriton
) -> None:
    port = int(triton.target.rpartition(":")[2])
    watches = [
        client.health.Watch(health_pb2.HealthCheckRequest(service=service)) for service in SERVICES
    ]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    # One watcher who leaves must not silence the others of its service.
    leaver = client.health.Watch(health_pb2.HealthCheckRequest())
    await leaver.read()
    leaver.cancel()
    await triton.stop()
    for watch in watches:
        assert (await watch.read()).status == NOT_SERVING
    assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.UNAVAILABLE
    await triton.start(port)
    for watch in watches:
        assert (await asyncio.wait_for(watch.read(), 30)).status == SERVING
    assert (await client.generate(prompt="Hi")).text == "Hello world"


async def test_an_unknown_service_can_be_watched(client: Client) -> None:
    watch = client.health.Watch(health_pb2.HealthCheckRequest(service="nothing"))
    answer = await watch.read()
    assert answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_the_gateway_may_start_before_triton(triton: FakeTriton) -> None:
    port = int(triton.target.rpartition(":")[2])
    await triton.stop()
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        assert await client.status() == NOT_SERVING
        outcome = await client.generate(prompt="Hi")
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        await triton.start(port)
        await client.wait_serving()
        assert (await client.generate(prompt="Hi")).text == "Hello world"


@pytest.mark.parametrize("probe", ["not_ready_reason", "describe"])
async def test_a_probe_that_breaks_is_not_serving_and_goes_on(
    client: Client,
    triton: FakeTriton,
    probe: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner: Any = replica if probe == "not_ready_reason" else TritonClient
    works = getattr(owner, probe)
    broken = True

    async def breaks(*arguments: Any) -> Any:
        if broken:
            raise RuntimeError("boom")
        return await works(*arguments)

    if probe == "describe":
        # It is asked only when Triton became ready.
        triton.server_ready = False
        await client.wait_serving(False)
        triton.server_ready = True
    monkeypatch.setattr(owner, probe, breaks)
    while "RuntimeError: boom" not in caplog.text:
        await asyncio.sleep(0.01)
    await client.wait_serving(False)
    outcome = await client.generate(prompt="Hi")
    assert outcome.code is grpc.StatusCode.UNAVAILABLE
    assert outcome.message == "the gateway failed to look at the model server"
    broken = False
    await client.wait_serving()
    assert (await client.generate(prompt="Hi")).text == "Hello world"
