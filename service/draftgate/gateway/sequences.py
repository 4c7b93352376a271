"""Requests of one sequence reach one replica, in their order: a model there keeps their state."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from draftgate.gateway.passed_request import SequenceStep
from draftgate.upstream.replica import Replica

__all__ = ["Sequences", "Turn"]

_MOST = 10_000


@dataclass
class Turn:
    """What the present request of a sequence finds, and leaves to the next."""

    replica: Replica | None = None
    """Where the sequence runs; None if it has not begun."""


@dataclass
class _Sequence:
    turn: Turn = field(default_factory=Turn)
    running: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    """Requests that run or wait for their turn."""


class Sequences:
    """All sequences that have begun and not ended. Beyond `most` the one that has been idle for the
    longest is forgotten: its next request may reach another replica, which knows nothing of it."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._found: OrderedDict[tuple[str, str, str | int], _Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    @asynccontextmanager
    async def turn(self, step: SequenceStep | None) -> AsyncIterator[Turn]:
        """Wait for the requests before this one to end. None is a request of its own."""
        if step is None:
            yield Turn()
            return
        sequence = self._found.setdefault(step.key, _Sequence())
        self._found.move_to_end(step.key)
        sequence.users += 1
        self._forget()
        try:
            async with sequence.running:
                try:
                    yield sequence.turn
                finally:
                    if step.end:
                        sequence.turn.replica = None
        finally:
            sequence.users -= 1
            if not sequence.users and sequence.turn.replica is None:
                del self._found[step.key]

    def _forget(self) -> None:
        while len(self._found) > self._most:
            idle = next((key for key, each in self._found.items() if not each.users), None)
            if idle is None:
                return
            del self._found[idle]
