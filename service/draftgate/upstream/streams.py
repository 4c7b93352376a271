"""Streaming gRPC calls with one request each, read in a callback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from urllib.parse import unquote_to_bytes

import grpc
from h2.errors import ErrorCodes

from draftgate.upstream.http2 import Connection, Headers, KeepAlive

__all__ = ["Call", "CallError", "StreamChannel"]

Metadata = Sequence[tuple[str, str]]

_PREFIX_BYTES = 5
"""In front of every message: whether it is compressed, and its length in four bytes."""
_CONNECT_TIMEOUT_S = 20.0
_USER_AGENT = f"draftgate/{version('draftgate')}".encode()
_STATUS = {str(code.value[0]).encode(): code for code in grpc.StatusCode}

# The gRPC protocol over HTTP/2, "Errors" and "HTTP to gRPC status code mapping".
_OF_RESETS: Mapping[int, grpc.StatusCode] = {
    ErrorCodes.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCodes.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCodes.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCodes.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}
_OF_HTTP = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}


class CallError(Exception):
    """A call ended with a status other than OK. Read as `grpc.RpcError`s are."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code = code
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class StreamChannel:
    """The calls to one server, in clear text. It connects when there is something to call. Needs a
    running event loop; `close` it from the same one."""

    def __init__(self, target: str, keep_alive: KeepAlive) -> None:
        """target: host:port."""
        self._target = target
        self._keep_alive = keep_alive
        self._connections: list[Connection] = []
        self._connecting: asyncio.Task[Connection] | None = None

    async def close(self) -> None:
        """Calls that still run fail."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        for connection in self._connections:
            connection.close()

    async def call(
        self, method: str, request: bytes, metadata: Metadata, take: Callable[[bytes], None]
    ) -> None:
        """`open` a call and wait until it has ended. Raises CallError as both do."""
        call = await self.open(method, request, metadata, take)
        await call.wait()

    async def open(
        self, method: str, request: bytes, metadata: Metadata, take: Callable[[bytes], None]
    ) -> Call:
        """Call `method`, /package.Service/Method, with one request; `take` gets every response as
        it comes, serialised. What it raises ends the call. Does not wait where there is a
        connection. Whoever opens a call waits for its end.

        Raises CallError(UNAVAILABLE) without a connection.
        """
        connection = await self._connection()
        call = Call(take, connection)
        call.number = connection.open(call, self._headers(method, metadata), _framed(request))
        return call

    async def _connection(self) -> Connection:
        """One that takes a call. Raises CallError(UNAVAILABLE)."""
        for connection in self._connections:
            if connection.has_room:
                return connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        # Of those who wait for it one may be cancelled.
        found = await asyncio.shield(self._connecting)
        if not found.has_room:
            raise CallError(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        return found

    async def _connect(self) -> Connection:
        host, _, port = self._target.rpartition(":")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self._keep_alive), host.strip("[]"), int(port)
                )
        except OSError as error:  # TimeoutError is one too.
            raise CallError(
                grpc.StatusCode.UNAVAILABLE, f"failed to connect to {self._target}: {error}"
            ) from error
        self._connections = [each for each in self._connections if not each.closed]
        self._connections.append(made)
        return made

    def _headers(self, method: str, metadata: Metadata) -> Headers:
        return [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", self._target.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", _USER_AGENT),
            *((key.encode(), value.encode()) for key, value in metadata),
        ]


class Call:
    """The stream of one call: its messages put together, its status read."""

    def __init__(self, take: Callable[[bytes], None], connection: Connection) -> None:
        self.number = 0
        """Of the connection's stream."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._connection = connection
        self._partial = b""
        self._told: dict[bytes, bytes] = {}

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over.done()

    async def wait(self) -> None:
        """Until its end; cancelling breaks it off.

        Raises CallError if it does not end with OK, and what taking a response raised.
        """
        try:
            await self._over
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Break it off. Without effect once it is over."""
        self._connection.cancel(self.number)
        self._fail(CallError(grpc.StatusCode.CANCELLED, "the call was broken off"))

    def headers(self, headers: Headers) -> None:
        self._told.update(headers)

    def data(self, content: bytes) -> None:
        if self._partial:
            content = self._partial + content
        start = 0
        try:
            while len(content) >= start + _PREFIX_BYTES:
                begin = start + _PREFIX_BYTES
                stop = begin + int.from_bytes(content[start + 1 : begin], "big")
                if content[start]:
                    raise CallError(grpc.StatusCode.INTERNAL, "a response is compressed")
                if len(content) < stop:
                    break
                self._take(content[begin:stop])
                start = stop
        except Exception as error:  # noqa: BLE001  # raised again by the call
            self._fail(error)
        self._partial = content[start:]

    def ended(self) -> None:
        code, details = self._status()
        if code is not grpc.StatusCode.OK:
            self._fail(CallError(code, details))
        elif self._partial:
            self._fail(CallError(grpc.StatusCode.INTERNAL, "a response is not complete"))
        elif not self._over.done():
            self._over.set_result(None)

    def reset(self, error_code: int) -> None:
        code = _OF_RESETS.get(error_code, grpc.StatusCode.INTERNAL)
        self._fail(CallError(code, f"RST_STREAM with error code {error_code}"))

    def lost(self, reason: str) -> None:
        self._fail(CallError(grpc.StatusCode.UNAVAILABLE, reason))

    def _fail(self, error: Exception) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def _status(self) -> tuple[grpc.StatusCode, str]:
        told = self._told.get(b"grpc-status")
        if told is None:
            http = self._told.get(b":status", b"none")
            code = _OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
            return code, f"no gRPC status, HTTP status {http.decode(errors='replace')}"
        code = _STATUS.get(told, grpc.StatusCode.UNKNOWN)
        return code, unquote_to_bytes(self._told.get(b"grpc-message", b"")).decode(errors="replace")


def _framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message
