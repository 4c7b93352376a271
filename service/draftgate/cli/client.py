"""A thin asyncio client of the gateway, as the commands need it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

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
from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest, GenerateResponse
from draftgate._pb.draftgate.v1.model_pb2 import GetModelRequest, Model
from draftgate.cli.access import CA_FILE, CERT_FILE, KEY_FILE, connect, open_transport
from draftgate.client.aio import AsyncStream
from draftgate.client.calls import Ask, watch_health
from draftgate.client.errors import CallError
from draftgate.client.types import ServingStatus
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["GatewayClient"]

_Answer = TypeVar("_Answer")

_LOOK_S = 1.0
"""To see whether there is a server at all, once a call has failed."""


class GatewayClient:
    """One connection to a gateway; use it as an async context manager.

    Every method raises DraftgateError with the code and the message of the gateway's status.
    """

    def __init__(self, server: str) -> None:
        """`server` is HOST:PORT."""
        self._server = server
        self._transport = open_transport(server)

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
        await self._transport.close()

    async def serving(self, *, timeout_s: float) -> None:
        """Wait until the gateway says that it serves."""
        watching = self._transport.follow(watch_health(""), timeout_s)
        async with aclosing(self._events(watching, timeout_s)) as statuses:
            async for status in statuses:
                if status is ServingStatus.SERVING:
                    return

    async def model(self, *, timeout_s: float) -> Model:
        """The served model."""
        question: Ask[Model] = Ask(
            lambda stubs: stubs.models.GetModel, GetModelRequest(), lambda found: found.model
        )
        return await self._ask(question, timeout_s)

    async def gate_state(self, *, timeout_s: float) -> GateState:
        """What the server's gate does and knows."""
        question: Ask[GateState] = Ask(
            lambda stubs: stubs.gate.GetState, GetStateRequest(), lambda found: found.state
        )
        return await self._ask(question, timeout_s)

    def watch_gate(self, *, interval_ms: int) -> AsyncGenerator[WatchStateResponse, None]:
        """The same every `interval_ms`. Closing the generator ends it on the server."""
        request = WatchStateRequest(interval_ms=interval_ms)
        question: Ask[WatchStateResponse] = Ask(
            lambda stubs: stubs.gate.WatchState, request, _as_it_is
        )
        return self._events(self._transport.follow(question, None))

    def watch_steps(self, *, interval_ms: int) -> AsyncGenerator[WatchStepsResponse, None]:
        """What becomes of the engine's steps from now on, the first answer at once. Closing the
        generator ends it on the server."""
        request = WatchStepsRequest(interval_ms=interval_ms)
        question: Ask[WatchStepsResponse] = Ask(
            lambda stubs: stubs.gate.WatchSteps, request, _as_it_is
        )
        return self._events(self._transport.follow(question, None))

    async def set_gate_policy(
        self, policy: GatePolicy, *, save: bool, timeout_s: float
    ) -> GateState:
        """Replace the gate's policy; its state then. save: at the next start too."""
        request = SetPolicyRequest(policy=policy, save=save)
        question: Ask[GateState] = Ask(
            lambda stubs: stubs.gate.SetPolicy, request, lambda found: found.state
        )
        return await self._ask(question, timeout_s)

    def generate(
        self, request: GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The events of one generation. Closing the generator cancels it on the server."""
        question: Ask[GenerateResponse] = Ask(
            lambda stubs: stubs.generation.Generate, request, _as_it_is
        )
        return self._events(self._transport.follow(question, timeout_s), timeout_s)

    async def _ask(self, question: Ask[_Answer], timeout_s: float) -> _Answer:
        try:
            return await self._transport.ask(question, timeout_s)
        except CallError as error:
            raise await self._translate(error, timeout_s) from error

    async def _events(
        self, stream: AsyncStream[_Answer], timeout_s: float = float("inf")
    ) -> AsyncGenerator[_Answer, None]:
        """What a call streams; it ends with the generator."""
        answered = False
        async with stream:
            try:
                async for event in stream:
                    answered = True
                    yield event
            except CallError as error:
                raise await self._translate(error, timeout_s, answered=answered) from error

    async def _translate(
        self, error: CallError, timeout_s: float, *, answered: bool = False
    ) -> DraftgateError:
        if error.code is ErrorCode.UNAVAILABLE and not self._connected():
            if answered:
                return DraftgateError(
                    ErrorCode.UNAVAILABLE, f"the server at {self._server} went away"
                )
            return DraftgateError(ErrorCode.UNAVAILABLE, await self._no_answer())
        if error.code is ErrorCode.DEADLINE_EXCEEDED:
            return DraftgateError(
                ErrorCode.DEADLINE_EXCEEDED, f"not finished within {timeout_s:g} s"
            )
        return error

    async def _no_answer(self) -> str:
        """Why there may be none."""
        if not await _listens(self._server):
            return (
                f"no server answers at {self._server}: start one with `draftgate serve`, "
                "or name another with --server HOST:PORT"
            )
        if self._transport.connection.tls is None:
            return (
                f"the server at {self._server} broke off, or does not answer in clear text: try "
                f"again, or if it speaks TLS name the certificates to trust in {CA_FILE}"
            )
        return (
            f"the server at {self._server} broke off, or does not answer over TLS: try again, or "
            f"see whether it speaks TLS, whether its certificate is one that {CA_FILE} vouches for,"
            f" and whether it wants one of yours ({CERT_FILE}, {KEY_FILE})"
        )

    def _connected(self) -> bool:
        return self._transport.channel.get_state() is grpc.ChannelConnectivity.READY


async def _listens(server: str) -> bool:
    """Whether anybody takes a connection there."""
    try:
        await connect(server, None, _LOOK_S)
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _as_it_is(answer: Any) -> Any:
    return answer
