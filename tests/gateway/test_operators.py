"""A listener for operators alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftgate._pb.draftgate.v1 import admin_pb2, gate_pb2
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import Gateway
from draftgate.gateway.auth import SecurityConfig, TlsConfig
from tests.fakes.triton import FakeTriton
from tests.support.certificates import Authority
from tests.support.gateway import Client, connected, running_gateway
from tests.support.tenants import TenantsFile

ADMIN = "draftgate.v1.AdminService"
OFF = gate_pb2.SetPolicyRequest(policy=gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF))


@asynccontextmanager
async def running(
    triton: FakeTriton, **config: Any
) -> AsyncIterator[tuple[Gateway, Client, Client]]:
    """A gateway with a client of its own listener and one of that for operators."""
    async with (
        running_gateway(triton.target, admin_listen="127.0.0.1:0", **config) as gateway,
        connected(gateway) as client,
        grpc.aio.insecure_channel(gateway.admin_address) as channel,
    ):
        await client.wait_serving()
        yield gateway, client, Client(channel)


async def services(client: Client) -> set[str]:
    call = reflection_pb2_grpc.ServerReflectionStub(client.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    return {each.name for each in answer.list_services_response.service}


async def test_operators_are_served_there_and_nowhere_else(triton: FakeTriton) -> None:
    async with running(triton) as (_, client, operators):
        assert list(await operators.replicas()) == [triton.target]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.replicas()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (await client.generate(prompt="Hi")).text == "Hello world"
        assert (await operators.generate(prompt="Hi")).code is grpc.StatusCode.UNIMPLEMENTED


async def test_the_gate_is_watched_on_both_and_steered_on_one(triton: FakeTriton) -> None:
    async with running(triton) as (_, client, operators):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.gate.SetPolicy(OFF)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "listener for operators" in (caught.value.details() or "")
        await operators.gate.SetPolicy(OFF)
        for each in (client, operators):
            state = (await each.gate.GetState(gate_pb2.GetStateRequest())).state
            assert state.policy.mode == gate_pb2.GATE_MODE_OFF


async def test_each_listener_tells_of_its_own_services(triton: FakeTriton) -> None:
    shared = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    async with running(triton) as (_, client, operators):
        assert await services(operators) == {ADMIN, "draftgate.v1.GateService", *shared}
        assert ADMIN not in await services(client)
        assert await operators.status(ADMIN) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.status(ADMIN)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_drain_is_seen_there_too_and_ends_what_is_watched(triton: FakeTriton) -> None:
    async with running(triton) as (gateway, _, operators):
        watch = operators.gate.WatchState(gate_pb2.WatchStateRequest())
        await watch.read()
        await operators.admin.Drain(admin_pb2.DrainRequest())
        await operators.wait_serving(False)
        await gateway.drain(0.0)

        async def to_the_end() -> None:
            while True:
                await watch.read()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_without_it_all_is_on_one_listener(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        assert gateway.admin_address == ""
        assert ADMIN in await services(client)
        assert list(await client.replicas()) == [triton.target]


async def test_its_callers_need_the_admin_scope(triton: FakeTriton, tmp_path: Path) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    plain, boss = tenants.add("acme"), tenants.add("boss", scopes=["generate", "admin"])
    request = admin_pb2.ListReplicasRequest()
    security = SecurityConfig(tenants_file=tenants.path)
    async with running(triton, security=security) as (_, _, operators):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await operators.admin.ListReplicas(request, metadata=[("x-api-key", plain)])
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await operators.admin.ListReplicas(request, metadata=[("x-api-key", boss)])


async def test_it_speaks_tls_where_the_other_does(triton: FakeTriton, tmp_path: Path) -> None:
    authority, cert, key = Authority(), tmp_path / "a.crt", tmp_path / "a.key"
    authority.issue("server").write(cert, key)
    security = SecurityConfig(tls=TlsConfig(cert, key))
    trusted = grpc.ssl_channel_credentials(authority.certificate)
    async with (
        running_gateway(triton.target, admin_listen="127.0.0.1:0", security=security) as gateway,
        grpc.aio.secure_channel(gateway.admin_address, trusted) as channel,
    ):
        assert list(await Client(channel).replicas()) == [triton.target]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "nonsense"])
async def test_the_rules_for_listening_are_the_same(triton: FakeTriton, listen: str) -> None:
    with pytest.raises(DraftgateError, match=f"cannot listen on {listen}: ") as caught:
        async with running_gateway(triton.target, admin_listen=listen):
            pass
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


async def test_both_are_free_after_a_start_that_failed(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as taken:
        with pytest.raises(DraftgateError, match="is in use"):
            async with running_gateway(
                triton.target, listen=taken.address, admin_listen="127.0.0.1:0"
            ):
                pass
        with pytest.raises(DraftgateError, match="is in use"):
            async with running_gateway(triton.target, admin_listen=taken.address):
                pass
