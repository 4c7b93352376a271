"""A gRPC server that outlives a call of a method whose name is no text.

grpc.aio makes text of the name of every method that is not registered, in the loop that takes all
calls in: one name that is not UTF-8, from anybody, ends that loop, and the server never answers
again. So calls of methods that are not registered are refused here, before it looks at them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import grpc
import grpc.aio

__all__ = ["make_server"]

# There is no public way in front of that loop.
_cygrpc: Any = import_module("grpc._cython.cygrpc")


def make_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """As `grpc.aio.server`. It answers the methods that are registered with
    `add_registered_method_handlers`, as generated code does, and no generic handler."""
    own = _cygrpc.AioServer
    _cygrpc.AioServer = _Server
    try:
        return grpc.aio.server(interceptors=interceptors, options=options)
    finally:
        _cygrpc.AioServer = own


class _Server(_cygrpc.AioServer):  # type: ignore[misc]  # it has no types
    async def _request_call(self) -> Any:
        """The next call of a method that is not registered: there is none for the loop."""
        refusing: set[asyncio.Task[None]] = set()
        while True:
            call = await super()._request_call()
            task = asyncio.create_task(_refuse(call))
            refusing.add(task)
            task.add_done_callback(refusing.discard)


async def _refuse(call: Any) -> None:
    context = _cygrpc._ServicerContext(call, None, None, asyncio.get_running_loop())
    try:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")
    except grpc.aio.BaseError:
        return  # That is how an abort ends, or the caller has gone.
