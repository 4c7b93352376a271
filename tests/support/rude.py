"""A client without manners, in as much HTTP/2 as one call takes.

The client of a gRPC library says goodbye, answers pings and reads ahead. This one does none of it:
it vanishes in the middle of a call, or stays and does not read. It costs one socket, so a thousand
of them fit into one test.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

from google.protobuf.message import Message

__all__ = ["RudeClient"]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 0x4
_WINDOW_BYTES = 65535
_STREAM = 1
_PREFIX_BYTES = 5
"""Before every message: whether it is compressed, and its length."""


class RudeClient:
    """One connection with one call on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._received = b""

    @classmethod
    async def connect(cls, port: int, *, window_bytes: int = _WINDOW_BYTES) -> RudeClient:
        """To a port of this machine. window_bytes: how much the server may send ahead, in all,
        since this client never allows more."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        window = struct.pack(">HI", _INITIAL_WINDOW_SIZE, window_bytes)
        client._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, window))
        return client

    def call(
        self, path: str | bytes, messages: Sequence[Message | bytes], *, half_close: bool = True
    ) -> None:
        """Begin the call; `path` is `/package.Service/Method`."""
        self._writer.write(_frame(_HEADERS, _END_HEADERS, _STREAM, _headers(path)))
        for message in messages:
            content = message if isinstance(message, bytes) else message.SerializeToString()
            self._writer.write(_frame(_DATA, 0, _STREAM, _prefixed(content)))
        if half_close:
            self._writer.write(_frame(_DATA, _END_STREAM, _STREAM, b""))

    async def message(self) -> bytes:
        """The next whole message. Raises EOFError if the call ends instead."""
        while True:
            if len(self._received) >= _PREFIX_BYTES:
                size = _PREFIX_BYTES + int.from_bytes(self._received[1:_PREFIX_BYTES])
                if len(self._received) >= size:
                    found = self._received[_PREFIX_BYTES:size]
                    self._received = self._received[size:]
                    return found
            await self._read()

    def stop_reading(self) -> None:
        """Take nothing from the socket any more, either."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]  # sockets have it

    def vanish(self) -> None:
        """Be gone without a word: the server finds the connection reset. Without effect then."""
        if self._writer.transport.is_closing():
            return
        found: socket.socket = self._writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def _read(self) -> None:
        """Take in one frame."""
        try:
            head = await self._reader.readexactly(9)
            content = await self._reader.readexactly(int.from_bytes(head[:3]))
        except asyncio.IncompleteReadError as error:
            raise EOFError("the server closed the connection") from error
        kind, flags = head[3], head[4]
        if kind == _SETTINGS and not flags & _ACK:
            # Whoever never acknowledges them loses the connection for that alone.
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _DATA:
            self._received += content
        elif kind == _HEADERS and flags & _END_STREAM:
            raise EOFError("the server ended the call")


def _prefixed(message: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(message)) + message


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + content
    )


def _headers(path: str | bytes) -> bytes:
    """Every header as a literal that nobody is to remember."""
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    length = len(content)
    if length < 0x7F:
        return bytes((length,)) + content
    # The integers of HPACK: seven bits in the first byte, and then groups of seven.
    head, rest = bytearray((0x7F,)), length - 0x7F
    while rest > 0x7F:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return bytes(head) + content
