"""A server that knows no service: it answers any call, of any kind, as it is told to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

__all__ = ["Call", "End", "FakeWire", "Hang", "More"]


@dataclass(frozen=True)
class End:
    """Step of a script: end the call with a status and its details."""

    code: grpc.StatusCode
    message: str = "no"
    retry_after_s: float | None = None
    details: Sequence[Message] = ()

    def status(self) -> status_pb2.Status:
        found = status_pb2.Status(code=code_pb2.Code.Value(self.code.name), message=self.message)
        details = list(self.details)
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(round(self.retry_after_s * 1000))
            details.append(retry)
        for each in details:
            found.details.add().Pack(each)
        return found


class Hang:
    """Step of a script: say nothing more until the caller goes away."""


@dataclass(frozen=True)
class More:
    """Step of a script: wait until so many requests came behind the first."""

    requests: int


Step = Message | End | Hang | More


@dataclass(frozen=True)
class Call:
    """A call as it arrived."""

    method: str
    """`package.Service/Method`"""
    metadata: Mapping[str, Any]
    request: bytes
    """The first one."""
    timeout_s: float | None
    peer: str
    """The connection on which it came."""


class FakeWire(grpc.GenericRpcHandler):
    """On a free port of 127.0.0.1; use it as an async context manager. Without a script an answer
    is one message without fields, which every kind of answer can be."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.more: list[bytes] = []
        """Requests that were not the first of their call."""
        self.scripts: deque[Sequence[Step]] = deque()
        self.address = ""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop(None)

    @property
    def methods(self) -> list[str]:
        return [call.method for call in self.calls]

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until something happened here."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method.removeprefix("/")

        async def answer(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            metadata = dict(context.invocation_metadata() or ())
            first = await anext(requests)
            left_s = context.time_remaining()
            self.calls.append(Call(method, metadata, first, left_s, context.peer()))
            script = self.scripts.popleft() if self.scripts else None
            reading = asyncio.create_task(self._keep(requests))
            try:
                if script is None:
                    await context.write(b"")
                for step in script or ():
                    await self._take(step, context)
            finally:
                reading.cancel()

        # Fits every kind of call.
        return grpc.stream_stream_rpc_method_handler(answer)

    async def _keep(self, requests: AsyncIterator[bytes]) -> None:
        async for request in requests:
            self.more.append(request)

    async def _take(self, step: Step, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        match step:
            case End():
                await context.abort_with_status(rpc_status.to_status(step.status()))
            case Hang():
                await asyncio.Event().wait()
            case More():
                await self.wait_for(lambda: len(self.more) >= step.requests)
            case _:
                await context.write(step.SerializeToString())
