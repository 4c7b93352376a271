"""The servicer of `draftgate.v1.GateService`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import gate_pb2, gate_pb2_grpc
from draftgate.errors import invalid_argument
from draftgate.gateway import gate_convert
from draftgate.upstream.client import TritonClient

__all__ = ["GateServicer"]

_INTERVAL_MS = 1000
_INTERVALS_MS = (50, 60_000)


class GateServicer(gate_pb2_grpc.GateServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client

    async def GetState(  # noqa: N802  # the name is the protocol's
        self, request: gate_pb2.GetStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gate_pb2.GetStateResponse:
        return gate_pb2.GetStateResponse(state=await self._state())

    async def WatchState(  # type: ignore[override]  # noqa: N802  # writes instead of yielding
        self, request: gate_pb2.WatchStateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _INTERVAL_MS
        low, high = _INTERVALS_MS
        if not low <= interval_ms <= high:
            raise invalid_argument("interval_ms", interval_ms, f"{low} to {high}")
        async for state in self._states(interval_ms / 1e3):
            await context.write(gate_pb2.WatchStateResponse(state=state))

    async def SetPolicy(  # noqa: N802
        self, request: gate_pb2.SetPolicyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gate_pb2.SetPolicyResponse:
        policy = gate_convert.policy_mapping(request.policy)
        state = await self._client.set_gate_policy(policy, save=request.save)
        return gate_pb2.SetPolicyResponse(state=gate_convert.state_message(state))

    async def _state(self) -> gate_pb2.GateState:
        return gate_convert.state_message(await self._client.gate_state())

    async def _states(self, interval_s: float) -> AsyncIterator[gate_pb2.GateState]:
        while True:
            yield await self._state()
            await asyncio.sleep(interval_s)
