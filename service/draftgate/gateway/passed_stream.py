"""One client's ModelStreamInfer stream: many requests at once, each on an RPC of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, shutting_down
from draftgate.gateway.calls import Context, writing
from draftgate.gateway.outbox import Outbox
from draftgate.telemetry.spans import OK, PassedSpan, PassedStart
from draftgate.telemetry.tracing import Tracing
from draftgate.upstream.buffer import BufferLimits
from draftgate.upstream.client import TritonClient
from draftgate.upstream.failures import in_tritons_words
from draftgate.upstream.raw import RawStream, error_message, failure_response

__all__ = ["PassedStream", "StreamSettings"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamSettings:
    """What one stream may take."""

    limits: BufferLimits = field(default_factory=BufferLimits)
    """How far its reader may lag behind before the stream is ended."""
    write_timeout_s: float = 10.0
    """How long one response may wait for the reader's transport before the stream is ended."""
    max_running: int = 256
    """Requests that may run at once; the next one is read when one of them has ended."""


class PassedStream:
    """To be `run` once."""

    def __init__(
        self,
        choose: Callable[[], TritonClient],
        tracing: Tracing,
        settings: StreamSettings,
        *,
        fails_with_status: bool,
        check: Callable[[pb.ModelInferRequest], None],
    ) -> None:
        """fails_with_status: the first failure of a request is the status of the stream; otherwise
        failures are told in band. `check` raises DraftgateError for a request that is not passed
        on."""
        self._choose = choose
        self._tracing = tracing
        self._settings = settings
        self._fails_with_status = fails_with_status
        self._check = check
        self._outbox = Outbox(settings.limits)
        self._running: set[RawStream] = set()
        self._slots = asyncio.Semaphore(settings.max_running)
        self._half_closed = False
        self._draining = False

    async def run(
        self, requests: AsyncIterator[pb.ModelInferRequest | DraftgateError], context: Context
    ) -> None:
        """Serve the stream to its end. Leaving, for whatever reason, ends the requests that run.

        Raises DraftgateError for what is the status of the stream.
        """
        accepting = asyncio.create_task(self._accept(requests))
        try:
            async with writing(context, self._settings.write_timeout_s) as write:
                while (response := await self._outbox.get()) is not None:
                    await write(response)
        finally:
            accepting.cancel()
            self._fail_stream(DraftgateError(ErrorCode.CANCELLED, "the stream was left"))

    def drain(self) -> None:
        """Take no more requests; end as soon as none runs."""
        self._draining = True
        self._end_if_done()

    def cut(self) -> None:
        """End now, with UNAVAILABLE."""
        self._fail_stream(
            DraftgateError(ErrorCode.UNAVAILABLE, "the server shut down during the request")
        )

    async def _accept(self, requests: AsyncIterator[pb.ModelInferRequest | DraftgateError]) -> None:
        try:
            async for request in requests:
                if isinstance(request, DraftgateError):
                    self._fail_stream(request)
                    return
                await self._slots.acquire()
                self._begin(request)
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a stream whose requests nobody reads would wait for ever.
            _log.exception("reading the requests of a stream failed")
            self._fail_stream(DraftgateError(ErrorCode.INTERNAL, "internal error"))
            return
        self._half_closed = True
        self._end_if_done()

    def _begin(self, request: pb.ModelInferRequest) -> None:
        try:
            self._check(request)
            if self._draining:
                raise shutting_down()
            about = self._stopped_by(request)
            client = about.client if about else self._choose()
        except DraftgateError as error:
            self._slots.release()
            self._fail(request.id, error)
            return
        raw = RawStream(client, request, wire_id=about.wire_id if about else None)
        start = PassedStart(
            model=request.model_name,
            request_id=raw.caller_id,
            upstream_request_id=raw.wire_id,
            server=client.config.target,
        )
        span = PassedSpan(self._tracing.tracer, start)
        self._running.add(raw)
        reading = raw.start(span.metadata(), partial(self._deliver, span))
        reading.add_done_callback(partial(self._ended, raw, span))

    def _stopped_by(self, request: pb.ModelInferRequest) -> RawStream | None:
        """The running request that this one, by the same id, is to stop."""
        if not any(tensor.name == contract.STOP for tensor in request.inputs):
            return None
        return next((each for each in self._running if each.caller_id == request.id), None)

    def _deliver(self, span: PassedSpan, response: bytes) -> None:
        span.response()
        message = error_message(response)
        if message:
            span.failed(in_tritons_words(message).code)
        if message and self._fails_with_status:
            self._fail_stream(in_tritons_words(message))
        else:
            self._put(response)

    def _ended(self, raw: RawStream, span: PassedSpan, reading: asyncio.Task[None]) -> None:
        self._running.discard(raw)
        self._slots.release()
        if raw.abandoned or reading.cancelled():
            span.end(ErrorCode.CANCELLED)
        elif raw.failure is not None:
            span.end(raw.failure.code)
            self._fail(raw.caller_id, raw.failure)
        else:
            span.end(OK)
        self._end_if_done()

    def _fail(self, request_id: str, error: DraftgateError) -> None:
        if self._fails_with_status:
            self._fail_stream(error)
        else:
            self._put(failure_response(request_id, error.message))

    def _put(self, response: bytes) -> None:
        try:
            self._outbox.put(response)
        except DraftgateError as error:
            self._fail_stream(error)

    def _fail_stream(self, error: DraftgateError) -> None:
        """End the stream and at once all that runs, also while a write waits for the reader."""
        self._outbox.fail(error)
        for each in tuple(self._running):
            each.abandon()

    def _end_if_done(self) -> None:
        if self._running:
            return
        if self._half_closed:
            self._outbox.close()
        elif self._draining:
            self._fail_stream(shutting_down())
