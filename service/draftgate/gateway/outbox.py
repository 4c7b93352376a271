"""A bounded hand-over of serialised responses from many readers of Triton to one client's stream.

The readers never wait here: a client that falls too far behind loses its stream instead.
"""

from __future__ import annotations

import asyncio
from collections import deque

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.buffer import BufferLimits

__all__ = ["Outbox"]


class Outbox:
    """What waits to be written to one client."""

    def __init__(self, limits: BufferLimits) -> None:
        self._limits = limits
        self._ready: deque[bytes] = deque()
        self._bytes = 0
        self._closed = False
        self._error: DraftgateError | None = None
        self._wake = asyncio.Event()

    def put(self, response: bytes) -> None:
        """Add a response. Without effect after `close` or `fail`.

        Raises DraftgateError(RESOURCE_EXHAUSTED), and drops what waits, if too much does.
        """
        if self._closed:
            return
        self._ready.append(response)
        self._bytes += len(response)
        waiting = len(self._ready)
        if waiting > self._limits.max_chunks or self._bytes > self._limits.max_bytes:
            self._ready.clear()
            raise DraftgateError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"the stream was read too slowly: {waiting} responses ({self._bytes} bytes)"
                f" waited, at most {self._limits.max_chunks} ({self._limits.max_bytes} bytes) may",
            )
        self._wake.set()

    def close(self) -> None:
        """End the stream well, behind what waits."""
        self._closed = True
        self._wake.set()

    def fail(self, error: DraftgateError) -> None:
        """End the stream with an error, behind what waits. Without effect after `close` or
        another `fail`."""
        if not self._closed:
            self._error = error
            self.close()

    async def get(self) -> bytes | None:
        """The next response, or None after the last. Raises the error given to `fail`."""
        while True:
            if self._ready:
                response = self._ready.popleft()
                self._bytes -= len(response)
                return response
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
