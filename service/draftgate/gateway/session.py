"""Many generations over one stream: commands in, what becomes of each generation out.

Knows no protocol. Each generation runs in a task of its own; one task sends what they all say, so
that whoever leaves early never leaves a message half sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument, shutting_down
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.field_names import within
from draftgate.gateway.session_generation import Answer, SessionGeneration
from draftgate.gateway.validate import GenerationCall, GenerationInput, check_id

__all__ = ["Cancel", "Command", "Grant", "Refused", "Session", "Start"]

_OUTBOX = 16
"""Answers that wait to be sent, of all generations together; what waits behind them is in the
generations' own buffers, which have limits."""


@dataclass(frozen=True)
class Start:
    """Run a generation."""

    id: str
    given: GenerationInput
    timeout_ms: int | None
    credit: int | None
    """Chunks of tokens that may be sent; None has no limit."""


@dataclass(frozen=True)
class Cancel:
    """End a generation."""

    id: str


@dataclass(frozen=True)
class Grant:
    """Allow a generation more chunks of tokens."""

    id: str
    credit: int


@dataclass(frozen=True)
class Refused:
    """A command that changed nothing, be it that it could not even be read."""

    id: str
    """Empty if it is not known."""
    error: DraftgateError


Command = Start | Cancel | Grant


class Session:
    """One stream of commands and answers."""

    def __init__(
        self,
        config: GatewayConfig,
        core: GenerationCore,
        check: Callable[[GenerationInput, int | None], GenerationCall],
        send: Callable[[Answer | Refused], Awaitable[None]],
    ) -> None:
        """`check` makes a call of what was given and a time limit in milliseconds; `send` is only
        called again once it has returned."""
        self._config = config
        self._core = core
        self._check = check
        self._send = send
        self._running: dict[str, SessionGeneration] = {}
        self._outbox: asyncio.Queue[Answer | Refused | None] = asyncio.Queue(_OUTBOX)
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self, commands: AsyncIterator[Command | Refused]) -> None:
        """Obey the commands; returns when they have ended and their generations too.

        Being cancelled ends all generations. Raises DraftgateError(UNAVAILABLE) after `close`, and
        whatever `send` raises.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_all())
                async with asyncio.TaskGroup() as generations:
                    self._reading = generations.create_task(self._obey(commands, generations))
                    if self._closed:
                        self._reading.cancel()
                await self._outbox.put(None)
        except ExceptionGroup as group:
            raise _first(group) from None
        if self._closed:
            raise shutting_down()

    def close(self) -> None:
        """Take no more commands; what runs may end."""
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()

    async def _obey(
        self, commands: AsyncIterator[Command | Refused], tasks: asyncio.TaskGroup
    ) -> None:
        async for command in commands:
            try:
                if isinstance(command, Start):
                    self._start(command, tasks)
                elif isinstance(command, Cancel):
                    self._cancel(command)
                elif isinstance(command, Grant):
                    self._grant(command)
                else:
                    await self._outbox.put(command)
            except DraftgateError as error:
                await self._outbox.put(Refused(command.id, error))

    def _start(self, start: Start, tasks: asyncio.TaskGroup) -> None:
        check_id("id", start.id)
        if start.id in self._running:
            raise DraftgateError(
                ErrorCode.ALREADY_EXISTS,
                f"id: a generation {start.id!r} runs in this session",
                field="id",
            )
        most = self._config.max_session_generations
        if len(self._running) >= most:
            raise DraftgateError(
                ErrorCode.RESOURCE_EXHAUSTED, f"{most} generations run in this session, the most"
            )
        if start.timeout_ms is not None and start.timeout_ms < 1:
            raise invalid_argument("start.timeout_ms", start.timeout_ms, "an integer from 1 on")
        if start.credit is not None and start.credit < 0:
            raise invalid_argument("start.credits", start.credit, "an integer from 0 on")
        try:
            call = self._check(start.given, start.timeout_ms)
        except DraftgateError as error:
            raise within("start.generation", error) from None
        generation = SessionGeneration(
            start.id, call, timeout_ms=start.timeout_ms, credit=start.credit
        )
        self._running[start.id] = generation
        tasks.create_task(self._run(generation))

    async def _run(self, generation: SessionGeneration) -> None:
        ended = await generation.run(
            self._core, self._outbox.put, credit_timeout_s=self._config.credit_timeout_s
        )
        del self._running[generation.id]
        await self._outbox.put(ended)

    def _cancel(self, cancel: Cancel) -> None:
        generation = self._running.get(cancel.id)
        if generation is not None:
            generation.end(DraftgateError(ErrorCode.CANCELLED, "the generation was cancelled"))

    def _grant(self, grant: Grant) -> None:
        if grant.credit < 1:
            raise invalid_argument("credits.tokens_events", grant.credit, "an integer from 1 on")
        generation = self._running.get(grant.id)
        if generation is not None:
            generation.grant(grant.credit)

    async def _send_all(self) -> None:
        while (answer := await self._outbox.get()) is not None:
            await self._send(answer)


def _first(error: Exception) -> Exception:
    """What went wrong first, out of the groups of the task groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
