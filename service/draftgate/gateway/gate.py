"""The servicer of `draftgate.v1.GateService`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import gate_pb2_grpc
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument, shutting_down
from draftgate.gateway import gate_convert
from draftgate.upstream.client import TritonClient
from draftgate.upstream.replicas import ReplicaSet

__all__ = ["GateServicer"]

_INTERVAL_MS = 1000
_INTERVALS_MS = (50, 60_000)

_Context = grpc.aio.ServicerContext[Any, Any]
_Request = pb.GetStateRequest | pb.WatchStateRequest | pb.SetPolicyRequest | pb.WatchStepsRequest


class GateServicer(gate_pb2_grpc.GateServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, replicas: ReplicaSet, *, steered_elsewhere: bool = False) -> None:
        """`steered_elsewhere`: policies are changed on the listener for operators alone."""
        self._replicas = replicas
        self._steered_elsewhere = steered_elsewhere
        self._closing = asyncio.Event()

    def drain(self) -> None:
        """End the watches, which nothing else would."""
        self._closing.set()

    async def GetState(  # noqa: N802  # the name is the protocol's
        self, request: pb.GetStateRequest, context: _Context
    ) -> pb.GetStateResponse:
        return pb.GetStateResponse(state=await _state(self._client(request)))

    async def WatchState(  # type: ignore[override]  # noqa: N802  # writes instead of yielding
        self, request: pb.WatchStateRequest, context: _Context
    ) -> None:
        interval_s = _interval_s(request)
        client = self._client(request)
        while True:
            await context.write(pb.WatchStateResponse(state=await _state(client)))
            await self._pause(interval_s)

    async def SetPolicy(  # noqa: N802
        self, request: pb.SetPolicyRequest, context: _Context
    ) -> pb.SetPolicyResponse:
        if self._steered_elsewhere:
            raise DraftgateError(
                ErrorCode.UNIMPLEMENTED,
                "the gate's policy is changed on this server's listener for operators alone",
            )
        if not request.HasField("policy"):
            raise invalid_argument("policy", None, "a policy, which replaces the present one")
        policy = gate_convert.policy_mapping(request.policy)
        try:
            state = await self._client(request).set_gate_policy(policy, save=request.save)
        except DraftgateError as error:
            raise gate_convert.policy_error(error) from error
        return pb.SetPolicyResponse(state=gate_convert.state_message(state))

    async def WatchSteps(  # type: ignore[override]  # noqa: N802
        self, request: pb.WatchStepsRequest, context: _Context
    ) -> None:
        interval_s = _interval_s(request)
        client = self._client(request)
        upto, read = await _begin(client, request)
        await context.write(read.message)
        while True:
            if read.last_step <= upto:
                await self._pause(interval_s)
            before, read = read, await _steps(client, upto)
            if read.run != before.run:
                raise DraftgateError(
                    ErrorCode.UNAVAILABLE, "the engine was restarted: its steps count from 1 again"
                )
            if read.message.steps:
                upto = read.message.steps[-1].step
                await context.write(read.message)

    def _client(self, request: _Request) -> TritonClient:
        """Of the replica that the request names."""
        return self._replicas.named(request.replica).client

    async def _pause(self, seconds: float) -> None:
        """Raises DraftgateError(UNAVAILABLE) when the server shuts down meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return
        raise shutting_down()


async def _begin(
    client: TritonClient, request: pb.WatchStepsRequest
) -> tuple[int, gate_convert.StepsRead]:
    """The number of the step up to which a caller has them now, and what was read."""
    if not request.HasField("after_step"):
        read = await _steps(client, None)
        return read.last_step, read
    if request.after_step < 0:
        raise invalid_argument("after_step", request.after_step, "an integer from 0 on")
    read = await _steps(client, request.after_step)
    if request.after_step > read.last_step:
        raise invalid_argument(
            "after_step", request.after_step, f"0 to {read.last_step}, the engine's last step"
        )
    steps = read.message.steps
    return steps[-1].step if steps else request.after_step, read


async def _state(client: TritonClient) -> pb.GateState:
    return gate_convert.state_message(await client.gate_state())


async def _steps(client: TritonClient, after: int | None) -> gate_convert.StepsRead:
    return gate_convert.steps_read(await client.gate_steps(after))


def _interval_s(request: pb.WatchStateRequest | pb.WatchStepsRequest) -> float:
    interval_ms = request.interval_ms if request.HasField("interval_ms") else _INTERVAL_MS
    low, high = _INTERVALS_MS
    if not low <= interval_ms <= high:
        raise invalid_argument("interval_ms", interval_ms, f"an integer {low} to {high}")
    return interval_ms / 1e3
