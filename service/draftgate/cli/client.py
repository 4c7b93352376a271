"""A thin asyncio client of the gateway, as the commands need it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from draftgate._pb.draftgate.v1.gate_pb2 import (
    GatePolicy,
    GateState,
    GetStateRequest,
    SetPolicyRequest,
    WatchStateRequest,
    WatchStateResponse,
    WatchStepsRequest,
    WatchStepsResponse,
)
from draftgate._pb.draftgate.v1.gate_pb2_grpc import GateServiceStub
from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest, GenerateResponse
from draftgate._pb.draftgate.v1.generation_pb2_grpc import GenerationServiceStub
from draftgate._pb.draftgate.v1.model_pb2 import GetModelRequest, Model
from draftgate._pb.draftgate.v1.model_pb2_grpc import ModelServiceStub
from draftgate.cli.access import open_channel
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["GatewayClient"]

_Event = TypeVar("_Event")


class GatewayClient:
    """One connection to a gateway; use it as an async context manager.

    Every method raises DraftgateError with the code and the message of the gateway's status.
    """

    def __init__(self, server: str) -> None:
        """`server` is HOST:PORT."""
        self._server = server
        self._channel = open_channel(server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection, cancelling what still runs on it."""
        await self._channel.close()

    async def serving(self, *, timeout_s: float) -> None:
        """Wait until the gateway says that it serves."""
        watching = HealthStub(self._channel).Watch(HealthCheckRequest(), timeout=timeout_s)
        try:
            async for update in watching:
                if update.status == HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, timeout_s) from error
        finally:
            watching.cancel()

    async def model(self, *, timeout_s: float) -> Model:
        """The served model."""
        try:
            response = await ModelServiceStub(self._channel).GetModel(
                GetModelRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, timeout_s) from error
        return response.model

    async def gate_state(self, *, timeout_s: float) -> GateState:
        """What the server's gate does and knows."""
        try:
            response = await GateServiceStub(self._channel).GetState(
                GetStateRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, timeout_s) from error
        return response.state

    def watch_gate(self, *, interval_ms: int) -> AsyncGenerator[WatchStateResponse, None]:
        """The same every `interval_ms`. Closing the generator ends it on the server."""
        request = WatchStateRequest(interval_ms=interval_ms)
        return self._events(GateServiceStub(self._channel).WatchState(request))

    def watch_steps(self, *, interval_ms: int) -> AsyncGenerator[WatchStepsResponse, None]:
        """What becomes of the engine's steps from now on, the first answer at once. Closing the
        generator ends it on the server."""
        request = WatchStepsRequest(interval_ms=interval_ms)
        return self._events(GateServiceStub(self._channel).WatchSteps(request))

    async def set_gate_policy(
        self, policy: GatePolicy, *, save: bool, timeout_s: float
    ) -> GateState:
        """Replace the gate's policy; its state then. save: at the next start too."""
        request = SetPolicyRequest(policy=policy, save=save)
        try:
            response = await GateServiceStub(self._channel).SetPolicy(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, timeout_s) from error
        return response.state

    def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The events of one generation. Closing the generator cancels it on the server."""
        call = GenerationServiceStub(self._channel).Generate(request, timeout=timeout_s)
        return self._events(call, timeout_s)

    async def _events(
        self, call: grpc.aio.UnaryStreamCall[Any, _Event], timeout_s: float = float("inf")
    ) -> AsyncGenerator[_Event, None]:
        """What a call streams; it ends with the generator."""
        answered = False
        try:
            async for event in call:
                answered = True
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, timeout_s, answered=answered) from error
        finally:
            call.cancel()

    def _translate(
        self, error: grpc.aio.AioRpcError, timeout_s: float, *, answered: bool = False
    ) -> DraftgateError:
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAVAILABLE and not self._connected():
            if answered:
                return DraftgateError(
                    ErrorCode.UNAVAILABLE, f"the server at {self._server} went away"
                )
            return DraftgateError(
                ErrorCode.UNAVAILABLE,
                f"no server answers at {self._server}: start one with `draftgate serve`, "
                "or name another with --server HOST:PORT",
            )
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DraftgateError(
                ErrorCode.DEADLINE_EXCEEDED,
                f"not finished within {timeout_s:g} s",
            )
        known = ErrorCode.__members__.get(code.name, ErrorCode.INTERNAL)
        return DraftgateError(known, details or f"the server answered {code.name}")

    def _connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY
