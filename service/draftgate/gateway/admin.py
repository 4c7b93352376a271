"""The servicer of `draftgate.v1.AdminService`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import admin_pb2 as pb
from draftgate._pb.draftgate.v1 import admin_pb2_grpc
from draftgate.errors import DraftgateError, invalid_argument
from draftgate.gateway import convert
from draftgate.gateway.orders import DrainReplica, Order, RefuseNew, SetLogLevel
from draftgate.upstream.replica import Replica
from draftgate.upstream.replicas import ReplicaSet

__all__ = ["AdminServicer"]

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: logging.DEBUG,
    pb.LOG_LEVEL_INFO: logging.INFO,
    pb.LOG_LEVEL_WARNING: logging.WARNING,
    pb.LOG_LEVEL_ERROR: logging.ERROR,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, replicas: ReplicaSet, tell: Callable[[Order], Awaitable[int]]) -> None:
        """`tell` has an order carried out by every process of the gateway, and returns how many
        generations run in all of them."""
        self._replicas = replicas
        self._tell = tell

    async def ListReplicas(  # noqa: N802  # the name is the protocol's
        self, request: pb.ListReplicasRequest, context: _Context
    ) -> pb.ListReplicasResponse:
        found = [convert.replica_message(replica) for replica in self._replicas.replicas]
        return pb.ListReplicasResponse(replicas=found)

    async def DrainReplica(  # noqa: N802
        self, request: pb.DrainReplicaRequest, context: _Context
    ) -> pb.DrainReplicaResponse:
        replica = self._known(request.address)
        await self._tell(DrainReplica(replica.target, draining=True, move=request.move))
        return pb.DrainReplicaResponse(replica=convert.replica_message(replica))

    async def UndrainReplica(  # noqa: N802
        self, request: pb.UndrainReplicaRequest, context: _Context
    ) -> pb.UndrainReplicaResponse:
        replica = self._known(request.address)
        await self._tell(DrainReplica(replica.target, draining=False))
        return pb.UndrainReplicaResponse(replica=convert.replica_message(replica))

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: _Context
    ) -> pb.DrainResponse:
        return pb.DrainResponse(generations=await self._tell(RefuseNew()))

    async def SetLogLevel(  # noqa: N802
        self, request: pb.SetLogLevelRequest, context: _Context
    ) -> pb.SetLogLevelResponse:
        if request.level not in _LEVELS:
            names = ", ".join(pb.LogLevel.Name(level) for level in _LEVELS)
            raise invalid_argument("level", request.level, f"one of {names}")
        previous = _named_level(logging.getLogger("draftgate").getEffectiveLevel())
        await self._tell(SetLogLevel(_LEVELS[request.level]))
        return pb.SetLogLevelResponse(previous=previous)

    def _known(self, address: str) -> Replica:
        try:
            return self._replicas.known(address)
        except DraftgateError as error:
            message = "address" + error.message.removeprefix(error.field)
            raise DraftgateError(error.code, message, field="address") from error


def _named_level(level: int) -> pb.LogLevel.ValueType:
    """The most that `level` lets through, in the protocol's words."""
    passed = [name for name, each in _LEVELS.items() if each >= level]
    return passed[0] if passed else pb.LOG_LEVEL_ERROR
