"""A budget of tokens that fills up with time."""

from __future__ import annotations

__all__ = ["TokenBucket"]


class TokenBucket:
    """Holds a minute's worth at most. Work is charged before it starts, with an upper bound, and
    settled when it has ended; what turned out larger than its bound makes a debt."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._now_s = now_s

    @property
    def per_minute(self) -> int:
        """What it holds when full."""
        return self._per_minute

    def wait_s(self, tokens: int, now_s: float) -> float:
        """How long until it holds `tokens`, at most `per_minute`; 0 if it does now."""
        self._fill(now_s)
        return max(0.0, (tokens - self._level) * 60 / self._per_minute)

    def take(self, tokens: int, now_s: float) -> None:
        """Charge `tokens`, whether it holds them or not."""
        self._fill(now_s)
        self._level -= tokens

    def settle(self, taken: int, used: int, now_s: float) -> None:
        """Of `taken` tokens only `used` were needed, or more than those."""
        self._fill(now_s)
        self._level = min(self._level + taken - used, self._per_minute)

    def resize(self, per_minute: int, now_s: float) -> None:
        """Hold and fill at another rate from now on; what was used stays used."""
        self._fill(now_s)
        self._level += per_minute - self._per_minute
        self._per_minute = per_minute

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._now_s)
        self._level = min(self._level + passed_s * self._per_minute / 60, self._per_minute)
        self._now_s = max(now_s, self._now_s)
