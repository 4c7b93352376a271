"""Many generations on one call, for asyncio.

One task reads the call and hands each answer to its generation. A generation has credits for so
many chunks as may wait unread, and gets more as they are read: so a reader that is slow holds up
nothing but its own generation.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from draftgate._pb.draftgate.v1 import session_pb2 as pb
from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest, GenerateResponse
from draftgate.client import convert, requests
from draftgate.client.aio import AsyncGeneration, AsyncTransport, failure_of, wait_unless
from draftgate.client.errors import CallError
from draftgate.client.retry import Attempts
from draftgate.client.types import Event, GenerationOptions, Prompt, Tokens
from draftgate.errors import ErrorCode, invalid_argument

__all__ = ["Session", "SessionGeneration"]

_Answer = GenerateResponse | pb.SessionStatus | CallError
"""What happened to a generation: an event, its end, or the end of the whole session."""


class Session:
    """One call with many generations: an asynchronous context manager. Leaving it ends the call,
    and with it all that still runs.

    If the call itself fails, every generation in it raises that CallError.
    """

    def __init__(self, transport: AsyncTransport, *, timeout_s: float | None, window: int) -> None:
        """`timeout_s` is for all of it; `window`: how many chunks of one generation may wait
        unread. Raises DraftgateError(INVALID_ARGUMENT) for a window below 2."""
        if window < 2:
            raise invalid_argument("window", window, "an integer from 2 on")
        self.window = window
        self._transport = transport
        # Its time alone: a session is not tried again, but its generations are.
        self._attempts = Attempts(transport.retry, timeout_s)
        # Holds what callers asked for until it is sent; None ends it.
        self._commands: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self._running: dict[str, SessionGeneration] = {}
        self._ids = map(str, itertools.count(1))
        self._reading: asyncio.Task[None] | None = None
        self._failure: CallError | None = None

    async def __aenter__(self) -> Self:
        self._transport.check_open()
        call = self._transport.stubs.sessions.Session(
            self._sent(),
            timeout=self._attempts.left_s(),
            metadata=self._transport.connection.metadata(),
        )
        self._call: grpc.aio.StreamStreamCall[Any, Any] = call
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()
        if self._reading is not None:
            await self._reading

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> SessionGeneration:
        """Start a generation; `timeout_s` is for it alone.

        Raises DraftgateError(INVALID_ARGUMENT) for what a request cannot hold, and CallError if the
        session's call has failed: FAILED_PRECONDITION if it has not begun.
        """
        attempts = Attempts(self._transport.retry, timeout_s)
        request = requests.generate_request(prompt, options)
        generation = SessionGeneration(self, next(self._ids), request, attempts)
        generation.start()
        return generation

    def register(self, generation: SessionGeneration) -> None:
        """Hand it what comes for its id from now on. Raises CallError as `generate` does."""
        if self._reading is None:
            raise CallError(ErrorCode.FAILED_PRECONDITION, "the session has not been entered")
        if self._failure is not None:
            raise self._failure
        self._running[generation.id] = generation

    def send(self, command: pb.SessionRequest) -> None:
        """Send it as soon as the transport takes it. Without effect if the session is over."""
        if self._failure is None:
            self._commands.put_nowait(command)

    async def _sent(self) -> AsyncIterator[pb.SessionRequest]:
        while (command := await self._commands.get()) is not None:
            yield command

    async def _read(self) -> None:
        """Hand out the answers, and then the end of the call to those that still run."""
        failure = CallError(ErrorCode.UNAVAILABLE, "the session ended")
        try:
            async for answer in self._call:
                self._hand_over(answer)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            failure = failure_of(error)
        finally:
            self._failure = failure
            self._commands.put_nowait(None)
            for generation in self._running.values():
                generation.take(failure)

    def _hand_over(self, answer: pb.SessionResponse) -> None:
        generation = self._running.get(answer.id)
        content = answer.WhichOneof("content")
        if generation is None or content is None:
            return  # It had ended by then; or this version does not know what it is told.
        if content != "event":
            del self._running[answer.id]
        generation.take(getattr(answer, content))


class SessionGeneration(AsyncGeneration):
    """A generation of a session. It goes on while nobody reads, for as long as its window has
    room."""

    def __init__(
        self, session: Session, name: str, request: GenerateRequest, attempts: Attempts
    ) -> None:
        super().__init__()
        self.id = name
        self._session = session
        self._request = request
        self._attempts = attempts
        # Bounded by the window.
        self._inbox: asyncio.Queue[_Answer] = asyncio.Queue()
        self._unpaid = 0
        self._left = asyncio.Event()
        self._over = False

    @property
    def unread(self) -> int:
        """How many events have come and wait to be read."""
        return self._inbox.qsize()

    def start(self) -> None:
        """Send it, once more if it was turned away. Raises CallError if the session is over."""
        self._session.register(self)
        left_s = self._attempts.left_s()
        start = pb.SessionStart(
            generation=self._request,
            timeout_ms=None if left_s is None else _milliseconds(left_s),
            credits=self._session.window,
        )
        self._session.send(pb.SessionRequest(id=self.id, start=start))

    def take(self, answer: _Answer) -> None:
        """What came for it."""
        self._inbox.put_nowait(answer)

    def cancel(self) -> None:
        self._left.set()
        if not self._over:
            self._session.send(pb.SessionRequest(id=self.id, cancel=pb.SessionCancel()))

    async def _next(self) -> Event:
        while not self._over:
            answer = await self._inbox.get()
            if not isinstance(answer, GenerateResponse):
                self._over = True
                await self._end(answer)
                continue
            self._attempts.answered()
            event = convert.event(answer)
            if isinstance(event, Tokens):
                self._pay()
            if event is not None:
                return event
        raise StopAsyncIteration

    def _pay(self) -> None:
        """Give the credit of a chunk that was read back, many at a time."""
        self._unpaid += 1
        if self._unpaid * 2 >= self._session.window:
            more = pb.SessionCredits(tokens_events=self._unpaid)
            self._session.send(pb.SessionRequest(id=self.id, credits=more))
            self._unpaid = 0

    async def _end(self, answer: pb.SessionStatus | CallError) -> None:
        """Begin the next attempt, if it ended and there is one; raises what ended it early."""
        if isinstance(answer, CallError):
            raise answer
        if answer.code == 0:
            return
        failure = CallError.from_session(answer)
        wait_s = self._attempts.wait_s(failure)
        if wait_s is None:
            raise failure
        await wait_unless(self._left, wait_s)
        self.start()
        self._over = False


def _milliseconds(time_s: float) -> int:
    """As the protocol takes them."""
    return min(max(1, math.ceil(time_s * 1000)), 2**31 - 1)
