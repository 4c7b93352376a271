"""How the blocking client waits: one answer, a stream of them, a generation."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc
from google.protobuf.message import Message

from draftgate.client.calls import Ask, Stubs
from draftgate.client.collected import Collected
from draftgate.client.connection import Connection, Metadata
from draftgate.client.errors import CallError, cancelled_here, closed_here
from draftgate.client.retry import Attempts, RetryPolicy
from draftgate.client.types import Completion, Event

__all__ = ["Generation", "Stream", "Transport"]

T = TypeVar("T")


class Transport:
    """Asks one gateway; may be used by several threads."""

    def __init__(self, connection: Connection, retry: RetryPolicy) -> None:
        """Raises DraftgateError(NOT_FOUND) for a certificate that cannot be read."""
        self.connection = connection
        self.retry = retry
        self._channel = connection.channel()
        self.stubs = Stubs(self._channel)
        self._closed = False

    def call(self, rpc: Any, request: Message, timeout_s: float | None, metadata: Metadata) -> Any:
        """What `rpc`, a stub's method, returns. Raises CallError(FAILED_PRECONDITION) after
        `close`, and what `rpc` raises."""
        try:
            if not self._closed:
                return rpc(request, timeout=timeout_s, metadata=metadata)
        except ValueError:
            if not self._closed:
                raise
            # Another thread closed it just now.
        raise closed_here()

    def ask(self, question: Ask[T], timeout_s: float | None) -> T:
        """The one answer. Raises CallError."""
        attempts = Attempts(self.retry, timeout_s)
        metadata = self.connection.metadata()
        rpc = question.rpc(self.stubs)
        while True:
            try:
                answer = self.call(rpc, question.request, attempts.left_s(), metadata)
                return question.read(answer)
            except grpc.RpcError as error:
                failure = CallError.from_call(error)
                wait_s = attempts.wait_s(failure)
                if wait_s is None:
                    raise failure from error
            time.sleep(wait_s)

    def follow(self, question: Ask[T], timeout_s: float | None) -> Stream[T]:
        """The stream of answers; the call begins now."""
        return Stream(self, question, timeout_s)

    def close(self) -> None:
        """Close the connection and cancel what still runs on it."""
        self._closed = True
        self._channel.close()


class _Leavable(ABC):
    """A context manager that ends what runs when it is left."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    @abstractmethod
    def cancel(self) -> None:
        """End it now, on the server too; whoever iterates gets a CallError(CANCELLED). Without
        effect if it has ended. May be called from another thread."""


class Stream(_Leavable, Generic[T]):
    """What a call streams, once: an iterator, and a context manager that ends the call when it is
    left.

    Iterating raises CallError for whatever ended the call early.
    """

    def __init__(self, transport: Transport, question: Ask[T], timeout_s: float | None) -> None:
        self._transport = transport
        self._question = question
        self._rpc = question.rpc(transport.stubs)
        self._metadata = transport.connection.metadata()
        self._attempts = Attempts(transport.retry, timeout_s)
        self._left = threading.Event()
        self._over = False
        self._begin()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        while not self._over:
            try:
                answer = next(self._call)
            except StopIteration:
                self._over = True
            except grpc.RpcError as error:
                self._over = True
                self._try_again(error)
            else:
                self._attempts.answered()
                return self._question.read(answer)
        raise StopIteration

    def cancel(self) -> None:
        self._left.set()
        self._call.cancel()

    def _begin(self) -> None:
        self._call: Any = self._transport.call(
            self._rpc, self._question.request, self._attempts.left_s(), self._metadata
        )
        if self._left.is_set():  # Another thread left just before.
            self._call.cancel()

    def _try_again(self, error: grpc.RpcError) -> None:
        """Begin the next attempt when it is time; raises what `error` says if there is none."""
        failure = cancelled_here() if self._left.is_set() else CallError.from_call(error)
        wait_s = self._attempts.wait_s(failure)
        if wait_s is None:
            raise failure from error
        if self._left.wait(wait_s):
            raise cancelled_here() from error
        self._begin()
        self._over = False


class Generation(Collected, _Leavable):
    """A running generation: an iterator of its events, and a context manager that ends it when it
    is left early.

    Iterating raises CallError for whatever ended it early; what had come until then stays in
    `choices`, `text_so_far` and `finished`.
    """

    def __init__(self, stream: Stream[Event | None]) -> None:
        super().__init__()
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        while (event := next(self._stream)) is None:
            pass
        self._take(event)
        return event

    def text(self) -> str:
        """All text of the first choice: reads to the end. Raises CallError."""
        self._read_all()
        return self.text_so_far

    def completion(self) -> Completion:
        """All of it: reads to the end. Raises CallError."""
        self._read_all()
        return self._completion()

    def cancel(self) -> None:
        self._stream.cancel()

    def _read_all(self) -> None:
        for _ in self:
            pass
