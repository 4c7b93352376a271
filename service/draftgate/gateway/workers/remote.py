"""Admission that is decided in the parent process, for the core of a worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from draftgate.errors import shutting_down
from draftgate.gateway.admission import AdmissionConfig, Ask, Capacity, Place
from draftgate.gateway.workers.messages import Admitted, Enter, Holds, Leave, Refused

__all__ = ["RemoteAdmission"]


class RemoteAdmission:
    """Asks for places and gives them back. Belongs to one event loop."""

    def __init__(self, send: Callable[[Enter | Leave | Holds], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[float]] = {}
        """Every seat that the parent knows: done when it may run, with how long it waited."""
        self._capacity: Capacity | None = None
        self._closed = False

    def set_capacity(self, capacity: Capacity) -> None:
        """The engines that this process sees hold this much from now on."""
        if capacity != self._capacity:
            self._capacity = capacity
            self._send(Holds(capacity.rows, capacity.kv_tokens))

    def configure(self, config: AdmissionConfig) -> None:
        """Without effect: where places are given, it is known already."""

    def close(self) -> None:
        """Refuse who waits and who comes from now on; who runs keeps its place."""
        self._closed = True
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(shutting_down())

    @asynccontextmanager
    async def admitted(self, ask: Ask) -> AsyncIterator[Place]:
        """A place for a generation, as soon as it is its turn; given back at the end.

        Raises DraftgateError as `Admission.admitted` does.
        """
        if self._closed:
            raise shutting_down()
        seat = next(self._numbers)
        answer = self._asked[seat] = asyncio.get_running_loop().create_future()
        self._send(Enter(seat, ask))
        place: Place | None = None
        try:
            place = Place(await answer, ask.prompt_tokens)
            yield place
        finally:
            if self._asked.pop(seat, None) is not None:
                self._send(Leave(seat, place.used_tokens if place else 0))

    def received(self, message: Admitted | Refused) -> None:
        """The answer to one that asked. One who has left meanwhile has said so."""
        if isinstance(message, Refused):
            answer = self._asked.pop(message.seat, None)
            if answer is not None and not answer.done():
                answer.set_exception(message.failure.error())
        else:
            answer = self._asked.get(message.seat)
            if answer is not None and not answer.done():
                answer.set_result(message.waited_s)
