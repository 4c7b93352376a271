"""How the asynchronous client waits: one answer, a stream of them, a generation."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from draftgate.client.calls import Ask, Stubs
from draftgate.client.collected import Collected
from draftgate.client.connection import Connection
from draftgate.client.errors import CallError, cancelled_here, closed_here
from draftgate.client.retry import Attempts, RetryPolicy
from draftgate.client.types import Completion, Event

__all__ = [
    "AsyncGeneration",
    "AsyncStream",
    "AsyncTransport",
    "StreamedGeneration",
    "failure_of",
    "wait_unless",
]

T = TypeVar("T")


class AsyncTransport:
    """Asks one gateway. It belongs to the event loop that runs when it is made."""

    def __init__(self, connection: Connection, retry: RetryPolicy) -> None:
        """Raises DraftgateError(NOT_FOUND) for a certificate that cannot be read."""
        self.connection = connection
        self.retry = retry
        self.channel = connection.async_channel()
        self.stubs = Stubs(self.channel)
        self._closed = False

    def check_open(self) -> None:
        """To be called before each call. Raises CallError(FAILED_PRECONDITION) after `close`."""
        if self._closed:
            raise closed_here()

    async def ask(self, question: Ask[T], timeout_s: float | None) -> T:
        """The one answer. Raises CallError."""
        attempts = Attempts(self.retry, timeout_s)
        metadata = self.connection.metadata()
        rpc = question.rpc(self.stubs)
        while True:
            self.check_open()
            try:
                answer = await rpc(question.request, timeout=attempts.left_s(), metadata=metadata)
                return question.read(answer)
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                failure = failure_of(error)
                wait_s = attempts.wait_s(failure)
                if wait_s is None:
                    raise failure from error
            await asyncio.sleep(wait_s)

    def follow(self, question: Ask[T], timeout_s: float | None) -> AsyncStream[T]:
        """The stream of answers; the call begins now."""
        return AsyncStream(self, question, timeout_s)

    async def close(self) -> None:
        """Close the connection and cancel what still runs on it."""
        self._closed = True
        await self.channel.close()


class _Leavable(ABC):
    """An asynchronous context manager that ends what runs when it is left."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @abstractmethod
    def cancel(self) -> None:
        """End it now, on the server too; whoever iterates gets a CallError(CANCELLED). Without
        effect if it has ended."""


class AsyncStream(_Leavable, Generic[T]):
    """What a call streams, once: an asynchronous iterator, and a context manager that ends the call
    when it is left.

    Iterating raises CallError for whatever ended the call early.
    """

    def __init__(
        self, transport: AsyncTransport, question: Ask[T], timeout_s: float | None
    ) -> None:
        self._transport = transport
        self._question = question
        self._rpc = question.rpc(transport.stubs)
        self._metadata = transport.connection.metadata()
        self._attempts = Attempts(transport.retry, timeout_s)
        self._left = asyncio.Event()
        self._over = False
        self._begin()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._over:
            try:
                answer = await anext(self._answers)
            except StopAsyncIteration:
                self._over = True
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                self._over = True
                await self._try_again(error)
            else:
                self._attempts.answered()
                return self._question.read(answer)
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._left.set()
        self._call.cancel()

    def _begin(self) -> None:
        self._transport.check_open()
        self._call: grpc.aio.UnaryStreamCall[Any, Any] = self._rpc(
            self._question.request, timeout=self._attempts.left_s(), metadata=self._metadata
        )
        self._answers = aiter(self._call)

    async def _try_again(self, error: BaseException) -> None:
        """Begin the next attempt when it is time; raises what `error` says if there is none."""
        failure = failure_of(error)
        wait_s = self._attempts.wait_s(failure)
        if wait_s is None:
            raise failure from error
        await wait_unless(self._left, wait_s)
        self._begin()
        self._over = False


class AsyncGeneration(Collected, _Leavable):
    """A running generation: an asynchronous iterator of its events, and a context manager that ends
    it when it is left early.

    Iterating raises CallError for whatever ended it early; what had come until then stays in
    `choices`, `text_so_far` and `finished`.
    """

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event = await self._next()
        self._take(event)
        return event

    async def text(self) -> str:
        """All text of the first choice: reads to the end. Raises CallError."""
        await self._read_all()
        return self.text_so_far

    async def completion(self) -> Completion:
        """All of it: reads to the end. Raises CallError."""
        await self._read_all()
        return self._completion()

    @abstractmethod
    async def _next(self) -> Event:
        """The next event. Raises StopAsyncIteration behind the last one, and CallError."""

    async def _read_all(self) -> None:
        async for _ in self:
            pass


class StreamedGeneration(AsyncGeneration):
    """A generation that has a call of its own."""

    def __init__(self, stream: AsyncStream[Event | None]) -> None:
        super().__init__()
        self._stream = stream

    def cancel(self) -> None:
        self._stream.cancel()

    async def _next(self) -> Event:
        while (event := await anext(self._stream)) is None:
            pass
        return event


async def wait_unless(left: asyncio.Event, wait_s: float) -> None:
    """Wait so long. Raises CallError(CANCELLED) as soon as the caller has left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await left.wait()
    if left.is_set():
        raise cancelled_here()


def failure_of(error: BaseException) -> CallError:
    """What the failure of a call is to its caller.

    A call that was cancelled raises CancelledError as if its reader's task had been. If the task
    was, this raises it again.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return CallError.from_call(error)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise error
    return cancelled_here()
