"""One generation on one Triton server: its streaming RPC, and the way to end it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream import failures, responses
from draftgate.upstream.buffer import ChunkBuffer
from draftgate.upstream.profiles import Profile
from draftgate.upstream.streams import Call
from draftgate.upstream.types import Chunk, GenerationRequest

if TYPE_CHECKING:
    from draftgate.upstream.client import TritonClient

__all__ = ["Generation"]

_log = logging.getLogger(__name__)

# What a request is turned down with. Any other failure, or one behind a chunk, may have left the
# engine with a running row: the ensemble does not end the engine's step when a later one fails.
_REFUSALS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.ALREADY_EXISTS,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.RESOURCE_EXHAUSTED,
        ErrorCode.UNIMPLEMENTED,
    }
)


class Generation:
    """One generation: `started` is an async context manager, inside it is an iterator of chunks.

    Leaving before the last chunk, for whatever reason, frees the engine's row: an ensemble does
    not hand a cancelled RPC on to its running step, so the engine is told with a `stop` request.
    Only a request that was refused has no row. The RPC itself is read to its end, because Triton
    may crash on an early cancel; it is cancelled where the models know no other way.
    """

    def __init__(self, client: TritonClient, request: GenerationRequest, profile: Profile) -> None:
        self._client = client
        # A caller may use its id again at once, and a late stop must not end the new generation.
        self.wire_id = f"{request.request_id}-{secrets.token_hex(4)}"
        self._profile = profile
        self._request = request
        self._reader = profile.reader(request)
        self._buffer = ChunkBuffer(
            client.config.limits, client.coalescing, wait=not request.at_once
        )
        self._opening: asyncio.Timeout | None = None
        self._call: Call | None = None
        self._leave: asyncio.TimerHandle | None = None
        self._began = False
        self._refused = False
        self._stopping = False

    @asynccontextmanager
    async def started(self, metadata: Sequence[tuple[str, str]] = ()) -> AsyncIterator[Generation]:
        """Run it. `metadata` goes with the RPC: the trace context of a sampled request."""
        await self._open(metadata)
        try:
            yield self
        finally:
            self.abandon(DraftgateError(ErrorCode.CANCELLED, "the generation was abandoned"))

    @property
    def began(self) -> bool:
        """Whether any chunk came."""
        return self._began

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from Triton; chunks may still wait to be taken."""
        return self._buffer.ended

    @property
    def refused(self) -> bool:
        """Whether it was turned down before it began."""
        return self._refused

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Chunk:
        """Raises DraftgateError for whatever ended the generation early, or kept it from starting:
        UNIMPLEMENTED or INVALID_ARGUMENT naming what is asked for that the models cannot do."""
        chunk = await self._buffer.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def abandon(self, error: DraftgateError) -> None:
        """End the generation now: the consumer sees `error` next, the engine is told to stop.

        Without effect once the last chunk came.
        """
        self._fail(error, at_once=True)

    def _fail(self, error: DraftgateError, *, at_once: bool = False) -> None:
        self._buffer.fail(error, at_once=at_once)
        if self._buffer.finished or self._refused or self._stopping:
            return
        self._stopping = True
        if self._call is not None:
            self._client.spawn(self._stop(self._call))
        elif self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    def _fail_upstream(self, error: DraftgateError) -> None:
        """Fail with what Triton said, in a response or as the status of the RPC."""
        self._refused = error.code in _REFUSALS and not self._began
        self._fail(error)

    async def _open(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the request, in the consumer's own task: a new one would wait for its turn."""
        try:
            call = self._call = await self._sent(metadata)
        except DraftgateError as error:
            self._fail_upstream(error)
            return
        if call is None:
            return
        self._client.spawn(self._read(call))
        if self._stopping:
            self._client.spawn(self._stop(call))

    async def _sent(self, metadata: Sequence[tuple[str, str]]) -> Call | None:
        """None if it was abandoned before."""
        try:
            async with asyncio.timeout(None) as self._opening:
                request = await self._profile.generation(self._request, self.wire_id)
                return await self._client.open_infer(request, metadata, self._take)
        except TimeoutError:
            if not self._stopping:
                raise
            return None
        finally:
            self._opening = None

    async def _read(self, call: Call) -> None:
        """Read the RPC to its end; once nobody wants the chunks any more, for a bounded time."""
        try:
            await self._client.infer_ended(call)
        except DraftgateError as error:
            self._fail_upstream(error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a consumer that is not told would wait for ever.
            _log.exception("generation %s: reading it failed", self.wire_id)
            self._fail(DraftgateError(ErrorCode.INTERNAL, "the gateway failed to read a response"))
        else:
            self._take_end()
        finally:
            if self._leave is not None:
                self._leave.cancel()

    def _take(self, response: pb.ModelStreamInferResponse) -> None:
        if self._buffer.ended:
            return
        if response.error_message:
            self._fail_upstream(failures.from_text(response.error_message))
        else:
            content = response.infer_response
            if responses.has_outputs(content):
                self._began = True
                self._client.chunks_received += 1
            try:
                self._put(self._reader.read(content))
            except DraftgateError as error:
                self._fail(error)
        if self._buffer.finished or self._refused:
            self._limit_reading()

    def _take_end(self) -> None:
        if self._buffer.ended:
            return
        try:
            self._put(self._reader.end())
        except DraftgateError as error:
            self._fail(error)

    def _put(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._buffer.put(chunk)

    async def _stop(self, call: Call) -> None:
        request = self._profile.stop(self.wire_id)
        if request is None:
            call.cancel()
            return
        try:
            await self._client.stop(request)
        except DraftgateError as error:
            _log.warning("generation %s could not be stopped: %s", self.wire_id, error.message)
        self._limit_reading()

    def _limit_reading(self) -> None:
        call = self._call
        if call is None or call.over or self._leave is not None:
            return
        loop = asyncio.get_running_loop()
        self._leave = loop.call_later(self._client.config.drain_timeout_s, self._give_up, call)

    def _give_up(self, call: Call) -> None:
        _log.warning("generation %s: Triton did not end its stream", self.wire_id)
        call.cancel()
