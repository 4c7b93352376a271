"""The latest steps, for whoever records them while the engine runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from draftgate.speculation import StepRecord

__all__ = ["StepLog", "StepsSince"]

_KEPT = 4096
"""Some minutes of steps on a CPU, seconds on a GPU: a reader that comes by every second misses
nothing."""


@dataclass(frozen=True)
class StepsSince:
    """What a reader gets."""

    steps: Sequence[StepRecord]
    """In order, without gaps."""
    lost: int
    """Steps before those that are no longer kept."""
    last_step: int
    """Number of the latest step there is; 0: none ran."""


class StepLog:
    """Keeps so many steps, and no more. Safe to use from any thread."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._lock = threading.Lock()
        self._records: deque[StepRecord] = deque(maxlen=kept)

    @property
    def last(self) -> StepRecord | None:
        """The latest step."""
        with self._lock:
            return self._records[-1] if self._records else None

    def add(self, record: StepRecord) -> None:
        """One more step: the number after the last one's."""
        with self._lock:
            self._records.append(record)

    def since(self, step: int, most: int) -> StepsSince:
        """The steps after the one of this number, the oldest first, `most` of them."""
        with self._lock:
            if not self._records:
                return StepsSince((), 0, 0)
            first, last = self._records[0].step, self._records[-1].step
            seen = max(step + 1 - first, 0)
            steps = tuple(islice(self._records, seen, seen + most))
        return StepsSince(steps, max(first - step - 1, 0), last)
