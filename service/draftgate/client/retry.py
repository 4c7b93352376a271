"""Trying again, when the server says so and nothing has come yet."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from draftgate.client.errors import CallError
from draftgate.errors import ErrorCode, invalid_argument

__all__ = ["DEFAULT_RETRY", "Attempts", "RetryPolicy"]

_LONGEST_S = 1e8
"""Some three years. A time far beyond that is over at once for gRPC, which counts nanoseconds."""

_RETRIED = frozenset({ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.UNAVAILABLE})


@dataclass(frozen=True)
class RetryPolicy:
    """How often to try a call again that a server turned away with a time after which to come back.

    Nothing else is tried again: not a failure without that time (RetryInfo), and no generation of
    which anything has come.
    """

    max_attempts: int = 3
    """All attempts of a call, the first included; 1 never tries again."""
    max_delay_s: float = 30.0
    """A server that wants more time than this is not asked again."""
    jitter: float = 0.2
    """Waits are longer by up to this share, by chance, so that those who were turned away together
    do not come back together. `max_delay_s` still holds."""

    def __post_init__(self) -> None:
        """Raises DraftgateError(INVALID_ARGUMENT) for a value out of range."""
        if self.max_attempts < 1:
            raise invalid_argument("max_attempts", self.max_attempts, "an integer from 1 on")
        for name in ("max_delay_s", "jitter"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise invalid_argument(name, value, "a finite number from 0 on")


class Attempts:
    """The attempts of one call, within its time."""

    def __init__(self, policy: RetryPolicy, timeout_s: float | None) -> None:
        """The time begins now; None has no end, nor has more than `_LONGEST_S`.

        Raises DraftgateError(INVALID_ARGUMENT) for a time that is none.
        """
        if timeout_s is not None and not timeout_s > 0:
            raise invalid_argument("timeout_s", timeout_s, "a time above 0, in seconds")
        self._policy = policy
        self._end_s = math.inf
        if timeout_s is not None and timeout_s <= _LONGEST_S:
            self._end_s = time.monotonic() + timeout_s
        self._made = 1
        self._answered = False

    def left_s(self) -> float | None:
        """Time for the next attempt; None has no end."""
        if self._end_s == math.inf:
            return None
        return max(0.0, self._end_s - time.monotonic())

    def answered(self) -> None:
        """Something has come: from now on a failure is one."""
        self._answered = True

    def wait_s(self, failure: CallError) -> float | None:
        """How long to wait before the next attempt; None: `failure` is the end."""
        asked_s = failure.retry_after_s
        if (
            self._answered
            or asked_s is None
            or failure.code not in _RETRIED
            or self._made >= self._policy.max_attempts
            or asked_s > self._policy.max_delay_s
        ):
            return None
        jitter = random.uniform(0, self._policy.jitter)
        wait_s = min(asked_s * (1 + jitter), self._policy.max_delay_s)
        left_s = self.left_s()
        if left_s is not None and wait_s >= left_s:
            return None  # The failure says more than that the time is over.
        self._made += 1
        return wait_s


DEFAULT_RETRY = RetryPolicy()
"""What clients do that are not told otherwise."""
