"""A bounded hand-over of one generation's chunks from the task that reads Triton to the consumer.

Triton must be read at its own speed: a reader that lags makes it hold responses without bound or
block a thread that serves every generation. So the reading side never waits here, and a consumer
that falls too far behind loses its generation instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.coalescing import Coalescing, follows, merged
from draftgate.upstream.responses import broken
from draftgate.upstream.types import Chunk

__all__ = ["BufferLimits", "ChunkBuffer"]

_LAGS = 16
"""So many chunks wait only for a consumer that lags."""
_MERGED_BYTES = 2**16
"""Most that becomes one chunk: clients limit the size of a message."""


@dataclass(frozen=True)
class BufferLimits:
    """How far the consumer of one generation may lag behind."""

    max_chunks: int = 1024
    """Chunks that wait; about as many engine steps."""
    max_bytes: int = 4 * 2**20
    """Bytes of the tensors of the chunks that wait, as they came over the wire."""


class ChunkBuffer:
    """Puts chunks in order and holds them for one consumer, within limits.

    The ensemble may deliver chunks out of order; they are released by index. While the gateway is
    busy, or the consumer lags, what waits is handed over as one chunk.
    """

    def __init__(
        self, limits: BufferLimits, coalescing: Coalescing | None = None, *, wait: bool = True
    ) -> None:
        """coalescing: None hands over every chunk alone. wait: whether chunks may wait for each
        other, but for the first, which does not."""
        self._limits = limits
        self._coalescing = coalescing
        self._wait = wait
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Chunk] = deque()
        self._early: dict[int, Chunk] = {}
        self._next_index = 0
        self._bytes = 0
        self._ended = False
        self._finished = False
        self._error: DraftgateError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until_beat = False
        """Whether the consumer waits for the beat, not for a chunk."""
        self._begun = False

    @property
    def ended(self) -> bool:
        """Whether nothing more is accepted: the last chunk came, or `fail` was called."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Whether the generation came to its own end."""
        return self._finished

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; the one with a finish reason is the last.

        Raises DraftgateError(RESOURCE_EXHAUSTED), and drops what waits, if the consumer lags too
        far behind; DraftgateError(INTERNAL) for an index seen before or one behind the last chunk.
        """
        if chunk.index < self._next_index or chunk.index in self._early:
            raise broken(f"chunk {chunk.index} came twice")
        self._bytes += chunk.size_bytes
        self._early[chunk.index] = chunk
        waiting = len(self._ready) + len(self._early)
        if waiting > self._limits.max_chunks or self._bytes > self._limits.max_bytes:
            self._ready.clear()
            raise DraftgateError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"the stream was read too slowly: {waiting} chunks ({self._bytes} bytes) waited,"
                f" at most {self._limits.max_chunks} ({self._limits.max_bytes} bytes) may",
            )
        while not self._ended and (due := self._early.pop(self._next_index, None)) is not None:
            self._ready.append(due)
            self._next_index += 1
            self._ended = self._finished = bool(due.finish_reason)
        if self._ended and self._early:
            raise broken("chunks came behind the last one")
        if self._coalescing is not None:
            self._coalescing.count()
        if self._ended or not self._until_beat:
            self._wake()

    def fail(self, error: DraftgateError, *, at_once: bool = False) -> None:
        """End with an error: behind the chunks that wait, or `at_once` in their place.

        The first error stays; one that comes behind the last chunk changes nothing.
        """
        if self._ended:
            return
        self._ended = True
        self._error = error
        self._early.clear()
        if at_once:
            self._ready.clear()
        self._wake()

    async def get(self) -> Chunk | None:
        """The next chunk, or None after the last. Raises the error given to `fail`."""
        waited = False
        while True:
            if self._ready and (waited or not self._may_wait()):
                return self._take()
            if self._ready:
                waited = True
                await self._beat()
            elif self._error is not None:
                raise self._error
            elif self._ended:
                return None
            else:
                await self._woken()

    def _may_wait(self) -> bool:
        """Whether what is there may wait for more."""
        return (
            self._wait
            and self._begun
            and not self._ended
            and self._coalescing is not None
            and self._coalescing.busy
        )

    def _take(self) -> Chunk:
        self._begun = True
        chunk = self._ready.popleft()
        self._bytes -= chunk.size_bytes
        if not self._ready or self._coalescing is None:
            return chunk
        if not self._coalescing.busy and len(self._ready) < _LAGS:
            return chunk
        parts = [chunk]
        room_bytes = _MERGED_BYTES - chunk.size_bytes
        while self._ready and follows(parts[-1], self._ready[0]):
            room_bytes -= self._ready[0].size_bytes
            if room_bytes < 0:
                break
            parts.append(self._ready.popleft())
            self._bytes -= parts[-1].size_bytes
        return merged(parts)

    async def _beat(self) -> None:
        assert self._coalescing is not None
        self._coalescing.at_beat(self._wake)
        self._until_beat = True
        try:
            await self._woken()
        finally:
            self._until_beat = False

    async def _woken(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
