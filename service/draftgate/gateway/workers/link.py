"""One end of the socket pair between the fleet and a worker: messages out, messages in."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

__all__ = ["MAX_MESSAGE_BYTES", "Link", "Messages"]

_log = logging.getLogger(__name__)

Got = TypeVar("Got")

_LENGTH_BYTES = 4

MAX_MESSAGE_BYTES = 2**20
"""Of one message. The largest is a configuration with many addresses, some kilobytes."""


class Messages(Generic[Got]):
    """JSON documents, each after its length in bytes (4, the highest first), cut out of what comes
    in whatever pieces."""

    def __init__(self, reader: TypeAdapter[Got]) -> None:
        self._reader = reader
        self._received = bytearray()

    @staticmethod
    def packed(content: bytes) -> bytes:
        """A document as it is sent."""
        return len(content).to_bytes(_LENGTH_BYTES, "big") + content

    def push(self, data: bytes) -> list[Got]:
        """The messages that are complete with `data`.

        Raises ValueError for what is none; after that nothing more can be read.
        """
        self._received += data
        found = []
        while len(self._received) >= _LENGTH_BYTES:
            length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes, allowed: {MAX_MESSAGE_BYTES}")
            end = _LENGTH_BYTES + length
            if len(self._received) < end:
                break
            content = bytes(self._received[_LENGTH_BYTES:end])
            del self._received[:end]
            found.append(self._reader.validate_json(content))
        return found


class Link(asyncio.Protocol, Generic[Got]):
    """Belongs to one event loop. Writing never waits: either side answers the other one's requests
    and no more, so that what waits to be read is bounded by what runs."""

    def __init__(
        self,
        reader: TypeAdapter[Got],
        writer: TypeAdapter[Any],
        on_message: Callable[[Got], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_end` hears once that the other side is gone, or that this one has closed the link."""
        self._messages = Messages(reader)
        self._writer = writer
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()

    async def open(self, end: socket.socket) -> None:
        """Begin. The link closes `end`."""
        end.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=end)

    def send(self, message: object) -> None:
        """Send a message; to nobody if the link has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(Messages.packed(self._writer.dump_json(message)))

    async def close(self) -> None:
        """End it once all that was sent is on its way."""
        if self._transport is not None:
            self._transport.close()
            await self._ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop have its methods, and are no subclass.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            messages = self._messages.push(data)
        except (ValueError, ValidationError) as error:
            # Another version on the other side, say. Nothing can be done with the rest.
            _log.error("a worker and its parent do not understand each other: %s", error)
            self._transport.abort()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()
        self._on_end()
