"""The client's side of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import generation_pb2, session_pb2
from tests.support.gateway import Client, Outcome

__all__ = ["SessionCall"]


class SessionCall:
    """One call, with everything that came so far, by id."""

    def __init__(self, client: Client, *, timeout: float | None = None) -> None:
        self.call = client.sessions.Session(timeout=timeout)
        self.outcomes: dict[str, Outcome] = {}
        """The events of each generation."""
        self.ended: dict[str, session_pb2.SessionStatus] = {}
        self.refused: list[tuple[str, session_pb2.SessionStatus]] = []

    async def start(
        self, name: str, *, timeout_ms: int | None = None, credit: int | None = None, **fields: Any
    ) -> None:
        """Start a generation; `fields` are those of GenerateRequest."""
        start = session_pb2.SessionStart(
            generation=generation_pb2.GenerateRequest(**({"prompt": "Hi"} | fields)),
            timeout_ms=timeout_ms,
            credits=credit,
        )
        await self.send(id=name, start=start)

    async def cancel(self, name: str) -> None:
        await self.send(id=name, cancel=session_pb2.SessionCancel())

    async def grant(self, name: str, credit: int) -> None:
        await self.send(id=name, credits=session_pb2.SessionCredits(tokens_events=credit))

    async def send(self, **fields: Any) -> None:
        await self.call.write(session_pb2.SessionRequest(**fields))

    def of(self, name: str) -> Outcome:
        return self.outcomes.setdefault(name, Outcome())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until something is so."""
        async with asyncio.timeout(30):
            while not condition():
                answer = await self.call.read()
                assert answer is not grpc.aio.EOF, "the session ended"
                self._take(answer)

    async def until_ended(self, name: str) -> Outcome:
        """Read until a generation is over; its events."""
        await self.until(lambda: name in self.ended)
        return self.of(name)

    async def finish(self) -> grpc.StatusCode:
        """Half-close and read to the end; the status of the call."""
        await self.call.done_writing()
        return await self.rest()

    async def rest(self) -> grpc.StatusCode:
        """Read to the end; the status of the call."""
        try:
            while (answer := await self.call.read()) is not grpc.aio.EOF:
                self._take(answer)
        except grpc.aio.AioRpcError:
            pass  # It is what is returned.
        return await self.call.code()

    def _take(self, answer: session_pb2.SessionResponse) -> None:
        kind = answer.WhichOneof("content")
        if kind == "event":
            assert answer.id not in self.ended, "an event behind the end"
            self.of(answer.id).events.append(answer.event)
        elif kind == "ended":
            assert answer.id not in self.ended, "ended twice"
            self.ended[answer.id] = answer.ended
        else:
            assert kind == "refused"
            self.refused.append((answer.id, answer.refused))
