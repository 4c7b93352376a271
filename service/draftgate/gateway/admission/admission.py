"""Lets callers wait for the place that the desk gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from draftgate.errors import shutting_down
from draftgate.gateway.admission.config import AdmissionConfig
from draftgate.gateway.admission.desk import Ask, Capacity, Desk, Seat

__all__ = ["Admission", "Place"]


@dataclass
class Place:
    """What a generation holds while it runs."""

    waited_s: float
    """How long it had to wait."""
    used_tokens: int
    """Prompt and output; what the prompt was held to be until the holder knows better."""


class Admission:
    """All places of one gateway. Belongs to one event loop."""

    def __init__(
        self, config: AdmissionConfig, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock_s = clock_s
        self._desk = Desk(config, clock_s())
        self._waiting: dict[Seat, asyncio.Future[None]] = {}
        self._closed = False

    @property
    def running(self) -> int:
        """How many hold a place."""
        return self._desk.running

    @property
    def waiting(self) -> int:
        """How many wait for one."""
        return self._desk.waiting

    def set_capacity(self, capacity: Capacity) -> None:
        """The engine holds this much from now on."""
        self._desk.capacity = capacity
        self._start(self._clock_s())

    def configure(self, config: AdmissionConfig) -> None:
        """These limits hold from now on; who waits already is refused when it was told."""
        self._config = config
        self._desk.configure(config)
        self._start(self._clock_s())

    def close(self) -> None:
        """Refuse who waits and who comes from now on; who runs keeps its place."""
        self._closed = True
        for started in self._waiting.values():
            if not started.done():
                started.set_exception(shutting_down())

    @asynccontextmanager
    async def admitted(self, ask: Ask) -> AsyncIterator[Place]:
        """A place for a generation, as soon as it is its turn; given back at the end.

        Raises DraftgateError: ALREADY_EXISTS for an id that is here, INVALID_ARGUMENT for what the
        tenant is never allowed, RESOURCE_EXHAUSTED for what is too much now, UNAVAILABLE once
        closed.
        """
        if self._closed:
            raise shutting_down()
        now_s = self._clock_s()
        seat = self._desk.enter(ask, now_s)
        place: Place | None = None
        try:
            self._start(now_s)
            if seat.started_s is None:
                await self._turn(seat)
            place = Place(seat.waited_s, ask.prompt_tokens)
            yield place
        finally:
            now_s = self._clock_s()
            self._desk.leave(seat, place.used_tokens if place else 0, now_s)
            self._start(now_s)

    async def _turn(self, seat: Seat) -> None:
        started = asyncio.get_running_loop().create_future()
        self._waiting[seat] = started
        try:
            async with asyncio.timeout(self._config.max_wait_s):
                await started
        except TimeoutError as error:
            raise self._desk.overdue(seat) from error
        finally:
            del self._waiting[seat]

    def _start(self, now_s: float) -> None:
        if self._closed:
            return
        while (seat := self._desk.start(now_s)) is not None:
            started = self._waiting.get(seat)
            # Not done, but for one that is being cancelled: it gives its place back at once.
            if started is not None and not started.done():
                started.set_result(None)
