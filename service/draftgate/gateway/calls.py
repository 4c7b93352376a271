"""What servicers ask of a call's context."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["Context", "deadline_ms", "write"]

_INT32_MAX = 2**31 - 1

Context = grpc.aio.ServicerContext[Any, Any]


def deadline_ms(context: Context) -> int | None:
    """The time that the call has left; None if it has no limit."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return max(1, min(int(remaining_s * 1000), _INT32_MAX))


async def write(context: Context, message: Message | bytes, timeout_s: float) -> None:
    """Send a message, or a serialised one, on the call's stream.

    Raises DraftgateError(RESOURCE_EXHAUSTED) if the reader's transport takes none for so long.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(message)
    except TimeoutError as error:
        raise DraftgateError(
            ErrorCode.RESOURCE_EXHAUSTED, f"the stream was not read for {timeout_s:g} s"
        ) from error
