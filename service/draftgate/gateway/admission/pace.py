"""How fast places come free."""

from __future__ import annotations

__all__ = ["Pace"]

_MEMORY = 8
"""How many rounds of ends it remembers, a round being as many as there are places held."""
_SMALLEST_ROUND = 16


class Pace:
    """Measures how long a place is held, as the time that places were held over the number given
    back (Little's law). Unlike a count of ends per second it holds at any occupancy, and places
    that are held for long tell before they are given back."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._held_s = 0.0
        self._ends = 0.0
        self._seen = 0

    def advance(self, held: int, now_s: float) -> None:
        """`held` places were held since the last call."""
        self._held_s += held * max(0.0, now_s - self._now_s)
        self._now_s = max(now_s, self._now_s)

    def end(self, held: int) -> None:
        """One of `held` places was given back just now."""
        kept = 1 - 1 / (_MEMORY * max(held, _SMALLEST_ROUND))
        self._held_s *= kept
        self._ends = self._ends * kept + 1
        self._seen += 1

    def ends_per_s(self, held: int) -> float | None:
        """How many of `held` places come free a second.

        None as long as fewer ever did: those that go on would count, and not as ended.
        """
        if self._seen < max(held, 1) or not self._held_s:
            return None
        return held * self._ends / self._held_s
