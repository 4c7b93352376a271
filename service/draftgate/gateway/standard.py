"""What surrounds calls to the standard services of gRPC: health and reflection.

Their servicers know no DraftgateError, and calls that come every second get no span. Bytes that are
no request are the caller's fault here too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from draftgate.errors import DraftgateError
from draftgate.gateway import status
from draftgate.gateway.boundary import Decoded, surround
from draftgate.gateway.calls import Context

__all__ = ["StandardBoundary"]

_PREFIX = "/grpc."


class StandardBoundary(grpc.aio.ServerInterceptor):
    """Surrounds the methods of the packages `grpc.*`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PREFIX):
            return handler
        return surround(handler, _surrounded, strict=False)


def _surrounded(inner: Callable[[Any, Context], Any]) -> Callable[..., Awaitable[Any]]:
    """`inner` may be written as a generator."""

    async def handle(request: Decoded, context: Context) -> Any:
        try:
            answer = inner(_checked(request), context)
            if not inspect.isasyncgen(answer):
                return await answer
            async with aclosing(answer):
                async for each in answer:
                    await context.write(each)
        except DraftgateError as error:
            await status.abort(context, error)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as gone:
            raise asyncio.CancelledError("the caller has gone") from gone

    return handle


def _checked(request: Decoded) -> Message | AsyncIterator[Message]:
    """Raises DraftgateError, at once or while a stream is read, for what could not be decoded."""
    if isinstance(request, DraftgateError):
        raise request
    return request if isinstance(request, Message) else _each_checked(request)


async def _each_checked(
    requests: AsyncIterator[Message | DraftgateError],
) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, DraftgateError):
            raise request
        yield request
