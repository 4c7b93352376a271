"""What servicers ask of a call's context."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["Context", "Write", "deadline_ms", "writing"]

_INT32_MAX = 2**31 - 1

Context = grpc.aio.ServicerContext[Any, Any]

Write = Callable[[Message | bytes], Awaitable[None]]


def deadline_ms(context: Context) -> int | None:
    """The time that the call has left; None if it has no limit."""
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return max(1, min(int(remaining_s * 1000), _INT32_MAX))


@asynccontextmanager
async def writing(context: Context, timeout_s: float) -> AsyncIterator[Write]:
    """The way to send messages, or serialised ones, on the call's stream, inside.

    Leaving raises DraftgateError(RESOURCE_EXHAUSTED) if one was not taken by the reader's transport
    for so long; the task is then cancelled in the middle of it.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            writer = _Writer(context, timeout_s, limit)
            try:
                yield writer.write
            finally:
                writer.close()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DraftgateError(
            ErrorCode.RESOURCE_EXHAUSTED, f"the stream was not read for {timeout_s:g} s"
        ) from error


class _Writer:
    """Watches its writes with one timer, which is set anew when it has run out: a time limit of its
    own for each would cost more than anything else that is done for a message."""

    def __init__(self, context: Context, timeout_s: float, limit: asyncio.Timeout) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        """Since when a write waits."""
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, message: Message | bytes) -> None:
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        await self._context.write(message)
        self._began_s = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if self._began_s is None:
            return
        due_s = self._began_s + self._timeout_s
        if due_s <= self._loop.time():
            self._limit.reschedule(due_s)
        else:
            self._timer = self._loop.call_at(due_s, self._look)
