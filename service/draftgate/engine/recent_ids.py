"""Ids of the recent past: of stops that came first, and of generations that have ended."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["RecentIds"]

_KEPT = 4096
"""More than are under way at any time."""


class RecentIds:
    """The latest ids put in, so many and no more, with the time of each."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str, now_s: float) -> None:
        self._ids[request_id] = now_s
        self._ids.move_to_end(request_id)
        while len(self._ids) > _KEPT:
            self._ids.popitem(last=False)

    def discard(self, request_id: str) -> float | None:
        """Take an id out; when it was put in, if it was there."""
        return self._ids.pop(request_id, None)
