"""A gateway that asks who is there, seen by real clients."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from draftgate._pb.draftgate.v1 import gate_pb2, model_pb2
from draftgate.gateway import Gateway
from draftgate.gateway.auth import JwtConfig, SecurityConfig, ServerLimits, new_key
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import Client, connected, running_gateway
from tests.support.tenants import Issuer, TenantsFile

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


@pytest.fixture
def tenants(tmp_path: Path) -> TenantsFile:
    return TenantsFile(tmp_path / "tenants.yaml")


@asynccontextmanager
async def secured(
    triton: FakeTriton, tenants: TenantsFile, **security: object
) -> AsyncIterator[tuple[Gateway, Client]]:
    config = SecurityConfig(tenants_file=tenants.path, **security)  # type: ignore[arg-type]
    async with (
        running_gateway(triton.target, security=config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()  # Health is open to everybody.
        yield gateway, client


def bearer(credentials: str) -> Sequence[tuple[str, str]]:
    return [("authorization", f"Bearer {credentials}")]


async def reflect(client: Client, metadata: Sequence[tuple[str, str]] = ()) -> int:
    """How many services reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    call = stub.ServerReflectionInfo(metadata=metadata)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    return len(answer.list_services_response.service)


async def test_only_who_has_a_key_gets_an_answer(triton: FakeTriton, tenants: TenantsFile) -> None:
    key = tenants.add("acme")
    async with secured(triton, tenants) as (_, client):
        outcome = await client.generate(prompt="Hi", metadata=bearer(key))
        assert (outcome.code, outcome.text) == (grpc.StatusCode.OK, "Hello world")
        for metadata in ([], bearer("nonsense"), bearer(new_key()[0])):
            outcome = await client.generate(prompt="Hi", metadata=metadata)
            assert outcome.code is grpc.StatusCode.UNAUTHENTICATED
            assert outcome.reason == "UNAUTHENTICATED"
            assert outcome.events == []
        assert len(triton.generations) == 1


async def test_a_call_of_any_kind_is_refused(triton: FakeTriton, tenants: TenantsFile) -> None:
    tenants.add("acme")
    async with secured(triton, tenants) as (_, client):
        channel, method = client.channel, "/draftgate.v1.ModelService/GetModel"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(method)(iter([b"", b""]))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in channel.stream_stream(method)(iter([b"", b""]))]
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # That there is no such method is said to anybody: reflection or its absence says it too.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/no.such.Service/Method")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_token_is_as_good_as_a_key(
    triton: FakeTriton, tenants: TenantsFile, tmp_path: Path
) -> None:
    tenants.add("acme")
    issuer = Issuer(tmp_path / "jwks.json")
    tokens = JwtConfig(issuer.jwks_file, "https://issuer.test", "draftgate")
    async with secured(triton, tenants, jwt=tokens) as (_, client):
        outcome = await client.generate(prompt="Hi", metadata=bearer(issuer.token()))
        assert outcome.code is grpc.StatusCode.OK
        outcome = await client.generate(prompt="Hi", metadata=bearer(issuer.token(aud="other")))
        assert outcome.code is grpc.StatusCode.UNAUTHENTICATED
        assert outcome.message == "the token is for another audience"


async def test_reflection_is_open_unless_it_is_closed(
    triton: FakeTriton, tenants: TenantsFile
) -> None:
    key = tenants.add("acme")
    async with secured(triton, tenants) as (_, client):
        assert await reflect(client) >= 5
    async with secured(triton, tenants, open_reflection=False) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reflect(client)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await reflect(client, bearer(key)) >= 5


async def test_changing_the_gate_needs_the_admin_scope(
    triton: FakeTriton, tenants: TenantsFile
) -> None:
    plain, admin = tenants.add("acme"), tenants.add("boss", scopes=["generate", "admin"])
    policy = gate_pb2.SetPolicyRequest(policy=gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF))
    async with secured(triton, tenants) as (_, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.gate.SetPolicy(policy, metadata=bearer(plain))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert caught.value.details() == (
            "draftgate.v1.GateService/SetPolicy needs the scope 'admin', which the credentials of "
            "tenant 'acme' do not have"
        )
        await client.gate.GetState(gate_pb2.GetStateRequest(), metadata=bearer(plain))
        await client.gate.SetPolicy(policy, metadata=bearer(admin))


async def test_each_tenant_has_its_own_limits(triton: FakeTriton, tenants: TenantsFile) -> None:
    small = tenants.add("small", max_concurrency=1, max_prompt_tokens=3)
    large = tenants.add("large")
    async with secured(triton, tenants) as (_, client):
        triton.scripts = [ENDLESS]
        stub = client.channel.unary_stream(
            "/draftgate.v1.GenerationService/Generate", request_serializer=bytes
        )
        call = stub(b"\x1a\x02Hi", metadata=bearer(small))
        await call.read()
        refused = await client.generate(prompt="Hi", metadata=bearer(small))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.reason == "TENANT_CONCURRENCY"
        assert (await client.generate(prompt="Hi", metadata=bearer(large))).error is None
        call.cancel()
        long = await client.generate(prompt="Hi " * 10, metadata=bearer(small))
        assert long.code is grpc.StatusCode.INVALID_ARGUMENT
        assert long.bad_fields == ["prompt"]


async def test_new_tenants_are_taken_up_while_serving(
    triton: FakeTriton, tenants: TenantsFile
) -> None:
    old = tenants.add("acme")
    async with secured(triton, tenants, reload_interval_s=3600) as (gateway, client):
        tenants.remove("acme")
        new = tenants.add("other")
        gateway.reload()
        outcome = await client.generate(prompt="Hi", metadata=bearer(old))
        assert outcome.code is grpc.StatusCode.UNAUTHENTICATED
        assert (await client.generate(prompt="Hi", metadata=bearer(new))).error is None


def records_of(caplog: pytest.LogCaptureFixture, **fields: str) -> list[dict[str, object]]:
    """The records of calls and generations that have these fields, as their fields."""
    found = [vars(each) for each in caplog.records if each.name == "draftgate.calls"]
    return [each for each in found if fields.items() <= each.items()]


async def test_who_was_refused_is_recorded_as_every_call_is(
    triton: FakeTriton, tenants: TenantsFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "draftgate")
    issuer = Issuer(tmp_path / "jwks.json")
    tokens = JwtConfig(issuer.jwks_file, "https://issuer.test", "draftgate")
    expired = tenants.add("late", expires=datetime(2020, 1, 1, tzinfo=UTC))
    key = tenants.add("acme")
    policy = gate_pb2.SetPolicyRequest(policy=gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF))
    async with secured(triton, tenants, jwt=tokens) as (_, client):
        await client.generate(prompt="Hi")
        await client.generate(prompt="Hi", metadata=bearer(expired))
        await client.generate(prompt="Hi", metadata=bearer(issuer.token(sub="x" * 1000)))
        with pytest.raises(grpc.aio.AioRpcError):
            await client.gate.SetPolicy(policy, metadata=bearer(key))
        await client.generate(prompt="Hi", request_id="r-1", metadata=bearer(key))
    method = "draftgate.v1.GenerationService/Generate"
    nobody, late = records_of(caplog, method=method, code="UNAUTHENTICATED")
    assert "tenant" not in nobody
    assert str(nobody["reason"]).startswith("no credentials: ")
    assert (late["tenant"], late["reason"]) == ("late", "the API key has expired")
    (stranger,) = records_of(caplog, method=method, code="PERMISSION_DENIED")
    assert stranger["tenant"] == "x" * 128
    (scope,) = records_of(caplog, method="draftgate.v1.GateService/SetPolicy")
    assert (scope["code"], scope["tenant"]) == ("PERMISSION_DENIED", "acme")
    assert all(isinstance(each["duration_ms"], float) for each in (nobody, late, stranger, scope))
    (generation,) = records_of(caplog, request_id="r-1")
    assert (generation["tenant"], generation["code"]) == ("acme", "OK")


async def test_no_secret_is_logged(
    triton: FakeTriton, tenants: TenantsFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    issuer = Issuer(tmp_path / "jwks.json")
    tokens = JwtConfig(issuer.jwks_file, "https://issuer.test", "draftgate")
    good, wrong = tenants.add("acme"), new_key()[0]
    secrets = [good, wrong, issuer.token(), issuer.token(aud="other"), "dXNlcjpwYXNz", "s3cret"]
    async with secured(triton, tenants, jwt=tokens) as (gateway, client):
        for secret in secrets:
            await client.generate(prompt="s3cret", metadata=bearer(secret))
            await client.generate(prompt="s3cret", metadata=[("x-api-key", secret)])
            await client.generate(prompt="s3cret", metadata=[("authorization", f"Basic {secret}")])
        tenants.path.write_text(f"tenants: {{acme: {{keys: [{{id: {wrong}}}]}}")
        with pytest.raises(Exception, match="no YAML"):
            gateway.reload()
    logged = "\n".join(f"{each.getMessage()} {each.exc_text or ''}" for each in caplog.records)
    assert "draftgate.v1.GenerationService/Generate: UNAUTHENTICATED in" in logged
    for secret in secrets:
        assert secret not in logged
        # Nor a part that would be enough.
        assert secret[-20:] not in logged


async def test_messages_and_headers_have_a_largest_size(triton: FakeTriton) -> None:
    limits = ServerLimits(max_request_bytes=2000, max_metadata_bytes=4096)
    config = SecurityConfig(limits=limits)
    async with (
        running_gateway(triton.target, security=config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        assert (await client.generate(prompt="x" * 1000)).error is None
        outcome = await client.generate(prompt="x" * 3000)
        assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        outcome = await client.generate(prompt="x", metadata=[("x-large", "x" * 5000)])
        assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await client.generate(prompt="x")).error is None


async def test_streams_and_connections_have_a_largest_number(triton: FakeTriton) -> None:
    limits = ServerLimits(max_streams_per_connection=1, max_connections=2)
    config = SecurityConfig(limits=limits)
    triton.default = ENDLESS
    async with (
        running_gateway(triton.target, security=config) as gateway,
        connected(gateway) as client,
        connected(gateway) as second,
    ):
        await client.wait_serving()
        await second.wait_serving()
        request = model_pb2.GetModelRequest()
        async with connected(gateway) as third:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await third.models.GetModel(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        call = client.channel.unary_stream("/draftgate.v1.GenerationService/Generate")(
            b"\x1a\x02Hi"
        )
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.models.GetModel(request, timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        call.cancel()
        await client.models.GetModel(request, timeout=30)
