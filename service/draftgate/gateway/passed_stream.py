"""One client's ModelStreamInfer stream: many requests at once, each on an RPC of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, shutting_down
from draftgate.gateway.admission import Place
from draftgate.gateway.calls import Context, deadline_ms, writing
from draftgate.gateway.outbox import Outbox
from draftgate.gateway.passing import Passing
from draftgate.telemetry.spans import PassedSpan
from draftgate.upstream.buffer import BufferLimits
from draftgate.upstream.failures import in_tritons_words
from draftgate.upstream.raw import RawStream, Told, failure_response, final_response
from draftgate.upstream.replica import Replica

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
    """Requests that may run or wait for a place at once; the next one is read when one of them has
    ended."""


@dataclass(eq=False)
class _Running:
    """A request that runs or waits."""

    caller_id: str
    model: str
    stops: bool = False
    """Whether all that it does is to stop another one."""
    raw: RawStream | None = None
    """None while it waits."""


class PassedStream:
    """To be `run` once."""

    def __init__(
        self,
        passing: Passing,
        settings: StreamSettings,
        *,
        fails_with_status: bool,
        check: Callable[[pb.ModelInferRequest], None],
    ) -> None:
        """fails_with_status: the first failure of a request is the status of the stream; otherwise
        failures are told in band. `check` raises DraftgateError for a request that is not passed
        on."""
        self._passing = passing
        self._settings = settings
        self._fails_with_status = fails_with_status
        self._check = check
        self._outbox = Outbox(settings.limits)
        self._running: dict[_Running, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(settings.max_running)
        self._half_closed = False
        self._draining = False

    async def run(
        self, requests: AsyncIterator[pb.ModelInferRequest | DraftgateError], context: Context
    ) -> None:
        """Serve the stream to its end. Leaving, for whatever reason, ends the requests that run or
        wait.

        Raises DraftgateError for what is the status of the stream.
        """
        accepting = asyncio.create_task(self._accept(requests, context))
        try:
            async with writing(context, self._settings.write_timeout_s) as write:
                while (response := await self._outbox.get()) is not None:
                    await write(response)
        finally:
            accepting.cancel()
            self._fail_stream(DraftgateError(ErrorCode.CANCELLED, "the stream was left"))
            if self._running:
                await asyncio.wait(self._running.values())

    def drain(self) -> None:
        """Take no more requests; end as soon as none runs."""
        self._draining = True
        self._end_if_done()

    def cut(self) -> None:
        """End now, with UNAVAILABLE."""
        self._fail_stream(
            DraftgateError(ErrorCode.UNAVAILABLE, "the server shut down during the request")
        )

    async def _accept(
        self, requests: AsyncIterator[pb.ModelInferRequest | DraftgateError], context: Context
    ) -> None:
        try:
            async for request in requests:
                if isinstance(request, DraftgateError):
                    self._fail_stream(request)
                    return
                await self._slots.acquire()
                self._begin(request, context)
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a stream whose requests nobody reads would wait for ever.
            _log.exception("reading the requests of a stream failed")
            self._fail_stream(DraftgateError(ErrorCode.INTERNAL, "internal error"))
            return
        self._half_closed = True
        self._end_if_done()

    def _begin(self, request: pb.ModelInferRequest, context: Context) -> None:
        running = _Running(request.id, request.model_name)
        task = asyncio.create_task(self._run(running, request, context))
        self._running[running] = task
        task.add_done_callback(partial(self._ended, running))

    async def _run(
        self, running: _Running, request: pb.ModelInferRequest, context: Context
    ) -> None:
        try:
            with self._passing.traced(request) as span:
                self._check(request)
                if self._draining:
                    raise shutting_down()
                await self._pass(running, request, span, context)
        except DraftgateError as error:
            self._fail(running.caller_id, error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            _log.exception("passing on a request failed")
            self._fail(running.caller_id, DraftgateError(ErrorCode.INTERNAL, "internal error"))

    async def _pass(
        self,
        running: _Running,
        request: pb.ModelInferRequest,
        span: PassedSpan,
        context: Context,
    ) -> None:
        passed = self._passing.read(request, deadline_ms(context))
        running.stops = passed.stops
        about = self._stopped_by(running)
        if about is not None and about.raw is None:
            # It waits for its place, so no replica knows of it.
            self._running[about].cancel()
            for each in (about, running):
                self._put(final_response(each.caller_id, each.model))
            return
        target = about.raw if about is not None else None

        async def send(replica: Replica, place: Place) -> None:
            running.raw = RawStream(
                replica,
                request,
                passed.size,
                caller_id=running.caller_id,
                wire_id=target.wire_id if target else None,
            )
            span.sent(running.raw.wire_id, replica.target)
            await running.raw.run(span.metadata(), partial(self._deliver, span, place))

        await self._passing.run(passed, span, send, at=target.replica if target else None)

    def _stopped_by(self, running: _Running) -> _Running | None:
        """The request that this one, by the same id, is to stop."""
        if not running.stops:
            return None
        for each, task in self._running.items():
            if each.caller_id == running.caller_id and not each.stops and not task.done():
                return each
        return None

    def _deliver(self, span: PassedSpan, place: Place, response: bytes, told: Told) -> None:
        span.response()
        place.used_tokens += told.tokens
        error = in_tritons_words(told.error) if told.error else None
        if error is not None:
            span.failed(error.code)
        if error is not None and self._fails_with_status:
            self._fail_stream(error)
        else:
            self._put(response)

    def _ended(self, running: _Running, task: asyncio.Task[None]) -> None:
        del self._running[running]
        self._slots.release()
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
        for task in tuple(self._running.values()):
            task.cancel()

    def _end_if_done(self) -> None:
        if self._running:
            return
        if self._half_closed:
            self._outbox.close()
        elif self._draining:
            self._fail_stream(shutting_down())
