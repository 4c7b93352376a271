"""A gateway in this process and a real client for it, on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from draftgate._pb.draftgate.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gate_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2_grpc,
    tokenizer_pb2_grpc,
)
from draftgate.gateway import Gateway, GatewayConfig

__all__ = ["MODEL", "Client", "Outcome", "connected", "refused", "running_gateway"]

MODEL = "test-model"


@dataclass
class Outcome:
    """Everything that one call brought."""

    events: list[generation_pb2.GenerateResponse] = field(default_factory=list)
    error: grpc.aio.AioRpcError | None = None

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self.error is None else self.error.code()

    @property
    def message(self) -> str:
        return "" if self.error is None else self.error.details() or ""

    @property
    def kinds(self) -> list[str]:
        return [str(event.WhichOneof("event")) for event in self.events]

    @property
    def chunks(self) -> list[generation_pb2.TokenChunk]:
        return [event.tokens for event in self.events if event.HasField("tokens")]

    @property
    def tokens(self) -> list[generation_pb2.Token]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def finished(self) -> generation_pb2.GenerationFinished:
        return self.events[-1].finished

    @property
    def details(self) -> Sequence[Any]:
        """What the status carries beside its message."""
        assert self.error is not None
        found = rpc_status.from_call(_Call(self.error))
        return [] if found is None else list(found.details)

    @property
    def bad_fields(self) -> list[str]:
        """The fields that the status' BadRequest names."""
        assert self.error is not None
        found = rpc_status.from_call(_Call(self.error))
        assert found is not None
        bad = error_details_pb2.BadRequest()
        return [
            violation.field
            for detail in found.details
            if detail.Unpack(bad)
            for violation in bad.field_violations
        ]

    @property
    def reason(self) -> str:
        """The reason in the status' ErrorInfo."""
        assert self.error is not None
        found = rpc_status.from_call(_Call(self.error))
        assert found is not None
        info = error_details_pb2.ErrorInfo()
        (reason,) = [info.reason for detail in found.details if detail.Unpack(info)]
        return str(reason)


@contextmanager
def refused(code: grpc.StatusCode, *fields: str) -> Iterator[Outcome]:
    """Expects a call inside to fail so, with these fields at fault; what it brought."""
    outcome = Outcome()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield outcome
    outcome.error = caught.value
    assert outcome.code is code
    assert outcome.bad_fields == list(fields)


class Client:
    """Calls a gateway over a real channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.gate = gate_pb2_grpc.GateServiceStub(channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def generate(
        self, *, timeout: float | None = None, metadata: Sequence[Any] = (), **fields: Any
    ) -> Outcome:
        """One generation to its end; fields are those of GenerateRequest."""
        request = generation_pb2.GenerateRequest(**fields)
        call = self.generation.Generate(request, timeout=timeout, metadata=metadata)
        outcome = Outcome()
        try:
            async for event in call:
                outcome.events.append(event)
        except grpc.aio.AioRpcError as error:
            outcome.error = error
        return outcome

    async def generate_once(
        self, *, return_tokens: bool = False, timeout: float | None = None, **fields: Any
    ) -> generation_pb2.GenerateOnceResponse:
        """One generation as a whole; fields are those of GenerateRequest."""
        request = generation_pb2.GenerateOnceRequest(
            generation=generation_pb2.GenerateRequest(**fields), return_tokens=return_tokens
        )
        return await self.generation.GenerateOnce(request, timeout=timeout)

    async def generate_raw(self, content: bytes) -> Outcome:
        """A Generate call with these bytes as its request."""
        call = self.channel.unary_stream(
            "/draftgate.v1.GenerationService/Generate",
            request_serializer=bytes,
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )(content)
        outcome = Outcome()
        try:
            async for event in call:
                outcome.events.append(event)
        except grpc.aio.AioRpcError as error:
            outcome.error = error
        return outcome

    async def get_model(self, name: str = "") -> model_pb2.Model:
        return (await self.models.GetModel(model_pb2.GetModelRequest(name=name))).model

    async def replicas(self) -> dict[str, admin_pb2.Replica]:
        """The replicas by their addresses."""
        answer = await self.admin.ListReplicas(admin_pb2.ListReplicasRequest())
        return {replica.address: replica for replica in answer.replicas}

    async def wait_all_ready(self) -> None:
        """Wait until every replica is ready."""
        async with asyncio.timeout(30):
            while not all(
                replica.state == admin_pb2.REPLICA_STATE_READY
                for replica in (await self.replicas()).values()
            ):
                await asyncio.sleep(0.01)

    async def status(self, service: str = "") -> int:
        """The health status of a service."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def wait_serving(self, serving: bool = True) -> None:
        wanted = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        async with asyncio.timeout(60):
            while await self.status() != wanted:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_gateway(triton_target: str, **config: Any) -> AsyncIterator[Gateway]:
    """A gateway on a free port, drained at the end."""
    fields = {"listen": "127.0.0.1:0", "model_name": MODEL, "probe_interval_s": 0.02}
    gateway = Gateway(GatewayConfig(triton_target=triton_target, **(fields | config)))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.drain(0.0)


@asynccontextmanager
async def connected(gateway: Gateway, *options: tuple[str, Any]) -> AsyncIterator[Client]:
    """A client on a channel of its own."""
    own = (("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}", options=own) as channel:
        yield Client(channel)


class _Call:
    """What grpc_status wants to see, from an error that the async API raised."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self._error = error

    def code(self) -> grpc.StatusCode:
        return self._error.code()

    def details(self) -> str | None:
        return self._error.details()

    def trailing_metadata(self) -> Any:
        return self._error.trailing_metadata() or ()
