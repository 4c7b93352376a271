"""What goes wrong again and again, told in the log, but not each time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

__all__ = ["AGAIN_S", "Complaint", "Novelty"]

AGAIN_S = 60.0
"""How long the log says no more of something that stays as it is."""
_MOST_TEXTS = 256


class Complaint:
    """Goes to the log when it begins, when it changes, once a minute while it lasts, and when it is
    over."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        what: str,
        over: str,
        fields: Mapping[str, str] | None = None,
        again_s: float = AGAIN_S,
    ) -> None:
        """`what` stands before each problem, `over` is said at the end; `fields` go along with each
        record."""
        self._log = log
        self._what = what
        self._over = over
        self._fields = dict(fields or {})
        self._again_s = again_s
        self._problem = ""
        self._told_s = 0.0

    def tell(self, problem: str, *, level: int = logging.WARNING) -> None:
        """This is wrong now."""
        now_s = time.monotonic()
        if problem == self._problem and now_s - self._told_s < self._again_s:
            return
        self._problem, self._told_s = problem, now_s
        fields = {**self._fields, "reason": problem}
        self._log.log(level, "%s: %s", self._what, problem, extra=fields)

    def over(self) -> bool:
        """Nothing is wrong now. Whether something was: then it is told, as loud as a warning, for
        who has read that."""
        if not self._problem:
            return False
        self._problem = ""
        self._log.warning("%s", self._over, extra=self._fields)
        return True


class Novelty:
    """Which texts the log has not had for a while."""

    def __init__(self, again_s: float = AGAIN_S) -> None:
        self._again_s = again_s
        self._told_s: dict[str, float] = {}
        """The latest, in their order."""

    def of(self, text: str) -> bool:
        """Whether it is to be told now; it counts as told then."""
        now_s = time.monotonic()
        if now_s - self._told_s.get(text, -math.inf) < self._again_s:
            return False
        self._told_s.pop(text, None)
        if len(self._told_s) >= _MOST_TEXTS:
            del self._told_s[next(iter(self._told_s))]
        self._told_s[text] = now_s
        return True
