"""Circuit breaking: when a replica that fails gets nothing more, and how it comes back.

Plain arithmetic over times that are handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Breaker", "BreakerLimits", "BreakerState"]


@dataclass(frozen=True)
class BreakerLimits:
    """When a breaker opens, and for how long."""

    failures: int = 3
    """Generations lost in a row, without a token between them, that open it."""
    min_open_s: float = 2.0
    """How long it stays open before the first trial."""
    max_open_s: float = 60.0
    """The longest time before a trial; it doubles with every one that fails."""
    probation_s: float = 10.0
    """How long after a good trial one failure is enough to open it again, for twice as long."""


class BreakerState(StrEnum):
    """Where a `Breaker` stands."""

    CLOSED = "closed"
    OPEN = "open"
    """Ejected: nothing is sent."""
    PROBATION = "probation"
    """Closed again, on a short leash."""


class Breaker:
    """One replica's. Times are seconds on any one clock that does not go back."""

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._open = False
        self._open_s = limits.min_open_s
        self._trial_due_s = 0.0
        self._probation_ends_s = -math.inf

    def state(self, now_s: float) -> BreakerState:
        if self._open:
            return BreakerState.OPEN
        on_probation = now_s < self._probation_ends_s
        return BreakerState.PROBATION if on_probation else BreakerState.CLOSED

    def succeeded(self) -> None:
        """A generation brought tokens. One that ran since before the breaker opened closes
        nothing."""
        self._failures = 0

    def failed(self, now_s: float) -> bool:
        """A generation was lost; whether that opened it."""
        self._failures += 1
        enough = self._failures >= self._limits.failures
        return (enough or self.state(now_s) is BreakerState.PROBATION) and self.trip(now_s)

    def trip(self, now_s: float) -> bool:
        """Open at once; False if it was open."""
        state = self.state(now_s)
        if state is BreakerState.OPEN:
            return False
        longer_s = self._open_s * 2 if state is BreakerState.PROBATION else self._limits.min_open_s
        self._wait(now_s, longer_s)
        self._open = True
        return True

    def trial_due(self, now_s: float) -> bool:
        """Whether it is open and has been for long enough to try the replica."""
        return self._open and now_s >= self._trial_due_s

    def hasten(self) -> None:
        """Something about the replica changed for the better: a trial is due now."""
        self._trial_due_s = -math.inf

    def trial_failed(self, now_s: float) -> None:
        """It stays open, for twice as long as before."""
        self._wait(now_s, self._open_s * 2)

    def trial_succeeded(self, now_s: float) -> None:
        """It closes, on probation."""
        self._open = False
        self._failures = 0
        self._probation_ends_s = now_s + self._limits.probation_s

    def _wait(self, now_s: float, open_s: float) -> None:
        self._open_s = min(open_s, self._limits.max_open_s)
        self._trial_due_s = now_s + self._open_s
