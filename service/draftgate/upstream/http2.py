"""One HTTP/2 connection to a gRPC server, for calls that bring very many small messages.

`h2` keeps the protocol's state and speaks for us. Two kinds of frames pass it by: those that carry
messages, nearly all that comes, are handed on here in a plain callback, where grpc.aio needs a
batch of its core, a wake-up from another thread and a future for each; and the one with which a
server leaves, after which `h2` would take the connection for closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error, ProtocolError
from h2.settings import SettingCodes
from hyperframe.frame import DataFrame, WindowUpdateFrame

__all__ = ["Connection", "Headers", "KeepAlive", "Stream"]

Headers = Sequence[tuple[bytes, bytes]]

# RFC 9113, sections 4.1 and 6.
_HEADER_BYTES = 9
_DATA, _GO_AWAY = 0x0, 0x7
_END_STREAM, _PADDED = 0x1, 0x8
_NUMBER_BITS = 0x7FFF_FFFF
_MAX_FRAME_BYTES = 16_384
_FIRST_WINDOW_BYTES = 65_535

_WINDOW_BYTES = 4 * 2**20
"""How far the server may be ahead of us, on a stream and on the connection. What comes is taken at
once, so it only has to bridge the way there and back."""
_PING = b"draftgat"

# Of headers ours are as they should be, and the server's are looked up by their names: nothing is
# gained from looking at all of them, for every call.
_CONFIG = H2Configuration(
    client_side=True,
    header_encoding=None,
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
    validate_inbound_headers=False,
    normalize_inbound_headers=False,
)


class Stream(Protocol):
    """Who hears what comes on a stream. None of it may raise."""

    def headers(self, headers: Headers) -> None:
        """The response's headers, or its trailers."""

    def data(self, content: bytes) -> None:
        """The next piece of the response's body."""

    def ended(self) -> None:
        """The server has said all."""

    def reset(self, error_code: int) -> None:
        """The server broke it off."""

    def lost(self, reason: str) -> None:
        """The connection is gone, or the server does not take the stream any more."""


@dataclass(frozen=True)
class KeepAlive:
    """How a server is found out that has vanished without a word, while streams wait for it."""

    after_s: float
    """Silence before a ping."""
    timeout_s: float
    """Silence after a ping that ends the connection."""


class _Open:
    """A stream that is not over."""

    def __init__(self, stream: Stream, body: bytes) -> None:
        self.stream = stream
        self.unsent = memoryview(body)
        self.taken_bytes = 0
        """Those that the server does not know yet that we have taken."""


class Connection(asyncio.Protocol):
    """For `loop.create_connection`. It lasts until it is lost or closed, or the server leaves and
    the last stream is over."""

    def __init__(self, keep_alive: KeepAlive) -> None:
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._h2 = H2Connection(_CONFIG)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, _Open] = {}
        self._unread = b""
        self._taken_bytes = 0
        self._leaving = False
        self._look: asyncio.TimerHandle | None = None
        self._heard_s = 0.0

    @property
    def closed(self) -> bool:
        """Whether it has come to its end."""
        return self._transport is None

    @property
    def has_room(self) -> bool:
        """Whether a stream can be opened now."""
        limit = self._h2.remote_settings.max_concurrent_streams
        return self._transport is not None and not self._leaving and len(self._streams) < limit

    def open(self, stream: Stream, headers: Headers, body: bytes) -> int:
        """Send a request; `stream` hears what comes back. Returns the stream's number."""
        number = self._h2.get_next_available_stream_id()
        # The last numbers are left alone: then no number is ever missing.
        self._leaving = number >= _NUMBER_BITS - 2
        self._h2.send_headers(number, headers)
        self._streams[number] = _Open(stream, body)
        self._send(number)
        self._flush()
        if self._look is None:
            self._heard_s = self._loop.time()
            self._look = self._loop.call_later(self._keep_alive.after_s, self._ping)
        return number

    def cancel(self, number: int) -> None:
        """Break a stream off: it hears nothing any more. Without effect once it is over."""
        if self._streams.pop(number, None) is not None:
            self._h2.reset_stream(number, ErrorCodes.CANCEL)
            self._flush()
            self._leave()

    def close(self) -> None:
        """End it. Streams that are not over hear that it is lost."""
        self._end("the connection was closed")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._h2.initiate_connection()
        self._h2.update_settings(
            {SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES, SettingCodes.ENABLE_PUSH: 0}
        )
        self._h2.increment_flow_control_window(_WINDOW_BYTES - _FIRST_WINDOW_BYTES)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_s = self._loop.time()
        content = self._unread + data if self._unread else data
        start, end = 0, len(content)
        try:
            while start + _HEADER_BYTES <= end:
                stop = start + _HEADER_BYTES + int.from_bytes(content[start : start + 3], "big")
                if stop > start + _HEADER_BYTES + _MAX_FRAME_BYTES:
                    raise ProtocolError("a frame is too large")
                if stop > end:
                    break
                self._take(content[start:stop])
                start = stop
        except H2Error as error:
            self._end(f"the server broke the protocol: {error}")
            return
        self._unread = content[start:]
        self._flush()
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection was lost")

    def _take(self, frame: bytes) -> None:
        kind = frame[3]
        number = int.from_bytes(frame[5:_HEADER_BYTES], "big") & _NUMBER_BITS
        if kind == _DATA:
            self._take_data(number, frame)
        elif kind == _GO_AWAY:
            self._leaving = True
            last = int.from_bytes(frame[_HEADER_BYTES : _HEADER_BYTES + 4], "big") & _NUMBER_BITS
            for refused in [each for each in self._streams if each > last]:
                self._streams.pop(refused).stream.lost("the server went away")
        else:
            for event in self._h2.receive_data(frame):
                self._hear(event)
            for waiting in [each for each, found in self._streams.items() if found.unsent]:
                self._send(waiting)

    def _take_data(self, number: int, frame: bytes) -> None:
        size_bytes = len(frame) - _HEADER_BYTES
        self._taken_bytes = self._allow(0, self._taken_bytes + size_bytes)
        found = self._streams.get(number)
        if found is None:
            return  # It was broken off.
        found.taken_bytes = self._allow(number, found.taken_bytes + size_bytes)
        flags = frame[4]
        if flags & _PADDED:
            if not size_bytes or frame[_HEADER_BYTES] >= size_bytes:
                raise ProtocolError("a frame is nothing but padding")
            found.stream.data(frame[_HEADER_BYTES + 1 : len(frame) - frame[_HEADER_BYTES]])
        else:
            found.stream.data(frame[_HEADER_BYTES:])
        if flags & _END_STREAM:
            for event in self._h2.receive_data(DataFrame(number, flags=["END_STREAM"]).serialize()):
                self._hear(event)

    def _allow(self, number: int, taken_bytes: int) -> int:
        """Let the server send as much again as was taken, now and then; what it does not know of
        then. Not by h2, which has not seen it come."""
        if taken_bytes < _WINDOW_BYTES // 2:
            return taken_bytes
        self._write(WindowUpdateFrame(number, window_increment=taken_bytes).serialize())
        return 0

    def _hear(self, event: Event) -> None:
        # Of the connection itself h2 has done what there is to do; that something came is noted.
        number = getattr(event, "stream_id", None)
        if number not in self._streams:
            return
        found = self._streams[number]
        if isinstance(event, ResponseReceived | TrailersReceived):
            found.stream.headers(event.headers)
        elif isinstance(event, StreamEnded):
            self._streams.pop(number).stream.ended()
        elif isinstance(event, StreamReset):
            self._streams.pop(number).stream.reset(int(event.error_code))

    def _send(self, number: int) -> None:
        """As much of a request as the server takes now."""
        found = self._streams[number]
        while found.unsent:
            room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if room <= 0:
                return
            piece, found.unsent = found.unsent[:room], found.unsent[room:]
            self._h2.send_data(number, bytes(piece), end_stream=not found.unsent)

    def _flush(self) -> None:
        self._write(self._h2.data_to_send())

    def _write(self, content: bytes) -> None:
        if content and self._transport is not None:
            self._transport.write(content)

    def _ping(self) -> None:
        """Look whether the server has been silent for too long, while streams are open."""
        self._look = None
        if not self._streams:
            return
        now_s, keep = self._loop.time(), self._keep_alive
        silent_s = now_s - self._heard_s
        if silent_s >= keep.after_s + keep.timeout_s:
            self._end("the server is silent")
            return
        due_s = self._heard_s + keep.after_s
        if silent_s >= keep.after_s:
            self._h2.ping(_PING)
            self._flush()
            due_s += keep.timeout_s
        self._look = self._loop.call_at(due_s, self._ping)

    def _leave(self) -> None:
        if self._leaving and not self._streams:
            self._end("")

    def _end(self, reason: str) -> None:
        """Close it; streams that are not over hear the reason."""
        transport, self._transport = self._transport, None
        if self._look is not None:
            self._look.cancel()
        if transport is not None:
            transport.close()
        streams, self._streams = self._streams, {}
        for found in streams.values():
            found.stream.lost(reason)
