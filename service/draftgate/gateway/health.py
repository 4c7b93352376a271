"""`grpc.health.v1`: Check, and a Watch that tells of every change.

Our own servicer because the one of grpcio-health-checking forgets the remaining watchers of a
service when one of them leaves, and holds its lock while it writes to a watcher that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["HealthServicer"]

_Context = grpc.aio.ServicerContext[object, health_pb2.HealthCheckResponse]
_Status = health_pb2.HealthCheckResponse

_SHOWN_CHARACTERS = 80
"""Of a name in a status: one as long as it likes would not get through."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the base is untyped
    """The same status for the server as a whole ("") and for each of its services."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", *services})
        self._status = _Status.NOT_SERVING
        self._changed = asyncio.Event()
        self._draining = False

    def set_serving(self, serving: bool) -> None:
        """Tell everybody who asks or watches. Without effect once draining."""
        if not self._draining:
            self._set(_Status.SERVING if serving else _Status.NOT_SERVING)

    def drain(self) -> None:
        """Not serving from now on."""
        self._draining = True
        self._set(_Status.NOT_SERVING)

    async def Check(  # noqa: N802  # the name is the protocol's
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            shown = request.service[:_SHOWN_CHARACTERS]
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {shown!r}")
        return _Status(status=self._status)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """Sends the status at once and then whenever it changed."""
        known = request.service in self._services
        sent = None
        while True:
            changed = self._changed
            status = self._status if known else _Status.SERVICE_UNKNOWN
            if status != sent:
                sent = status
                await context.write(_Status(status=sent))
            else:
                await changed.wait()

    def _set(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        if status != self._status:
            self._status = status
            self._changed.set()
            self._changed = asyncio.Event()
