"""The order in which waiting requests start: by priority, and fair between tenants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Priority"]

T = TypeVar("T")


class Priority(StrEnum):
    """Which of two queues a request waits in."""

    INTERACTIVE = "interactive"
    """Somebody is looking at the screen."""
    BATCH = "batch"
    """Whatever is left, and a small share in any case."""


class FairQueue(Generic[T]):
    """Two priorities, inside each of them stride scheduling over the tenants that wait.

    Each tenant has a position that grows by cost / weight with every start, and the tenant furthest
    behind is next. Who comes from idleness joins at the present position: nobody saves up turns.
    While both priorities wait, one start in every `interactive_per_batch` + 1 is a batch one.
    """

    def __init__(self, interactive_per_batch: int) -> None:
        self.interactive_per_batch = interactive_per_batch
        self._levels: dict[Priority, _Level[T]] = {each: _Level() for each in Priority}
        self._since_batch = 0

    def __len__(self) -> int:
        return sum(level.size for level in self._levels.values())

    def push(self, item: T, *, tenant: str, weight: float, cost: float, priority: Priority) -> None:
        """Let `item` wait. It must not be waiting already."""
        self._levels[priority].push(item, tenant, cost / weight)

    def peek(self) -> T | None:
        """Whose turn it is; None if nobody waits."""
        level = self._levels[self._turn()]
        return level.peek() if level.size else None

    def pop(self) -> T:
        """Take out whose turn it is. Raises IndexError if nobody waits."""
        turn = self._turn()
        batch_waits = self._levels[Priority.BATCH].size > 0
        item = self._levels[turn].pop()
        # Counted while a batch request waits only: its share is no debt from quieter times.
        held_back = turn is Priority.INTERACTIVE and batch_waits
        self._since_batch = self._since_batch + 1 if held_back else 0
        return item

    def remove(self, item: T, *, tenant: str, priority: Priority) -> None:
        """Take out `item`, which waits."""
        self._levels[priority].remove(item, tenant)

    def ahead(self, tenant: str, priority: Priority) -> int:
        """About how many start before a request that joins now, if weights and costs are equal."""
        ahead = self._levels[priority].ahead(tenant)
        interactive, batch = (self._levels[each].size for each in Priority)
        if priority is Priority.INTERACTIVE:
            return ahead + min(batch, (ahead + self._since_batch) // self.interactive_per_batch)
        turns = (ahead + 1) * self.interactive_per_batch - self._since_batch
        return ahead + min(interactive, max(0, turns))

    def _turn(self) -> Priority:
        interactive, batch = (self._levels[each].size for each in Priority)
        if not interactive or (batch and self._since_batch >= self.interactive_per_batch):
            return Priority.BATCH
        return Priority.INTERACTIVE


@dataclass
class _Lane(Generic[T]):
    """What one tenant has waiting, in order of arrival, each with its cost / weight."""

    position: float
    strides: dict[T, float] = field(default_factory=dict)


class _Level(Generic[T]):
    """The tenants of one priority."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane[T]] = {}
        self._position = 0.0
        self.size = 0

    def push(self, item: T, tenant: str, stride: float) -> None:
        lane = self._lanes.setdefault(tenant, _Lane(self._position))
        if not lane.strides:
            lane.position = max(lane.position, self._position)
        lane.strides[item] = stride
        self.size += 1

    def peek(self) -> T:
        return next(iter(self._next().strides))

    def pop(self) -> T:
        lane = self._next()
        item = next(iter(lane.strides))
        self._position = lane.position
        lane.position += lane.strides.pop(item)
        self._left()
        return item

    def remove(self, item: T, tenant: str) -> None:
        del self._lanes[tenant].strides[item]
        self._left()

    def ahead(self, tenant: str) -> int:
        """By turns: each of the others starts as many as the tenant itself, if it has as many."""
        own = self._lanes.get(tenant)
        own_size = len(own.strides) if own else 0
        others = (len(lane.strides) for lane in self._lanes.values() if lane is not own)
        return own_size + sum(min(size, own_size + 1) for size in others)

    def _next(self) -> _Lane[T]:
        if not self.size:
            raise IndexError("nobody waits")
        return min(self._waiting(), key=lambda lane: lane.position)

    def _waiting(self) -> Iterator[_Lane[T]]:
        return (lane for lane in self._lanes.values() if lane.strides)

    def _left(self) -> None:
        """An item has gone: forget tenants whose position says nothing any more."""
        self.size -= 1
        if not self.size:
            self._lanes.clear()
            self._position = 0.0
            return
        gone = [
            tenant
            for tenant, lane in self._lanes.items()
            if not lane.strides and lane.position <= self._position
        ]
        for tenant in gone:
            del self._lanes[tenant]
