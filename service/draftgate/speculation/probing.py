"""When to draft a little although nothing is drafted, to see whether it would pay again."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from draftgate.speculation.settings import GateSettings

__all__ = ["Prober"]

_NEWS = 1.01
"""What drafts promise has to have risen by this factor since the last probe for more to be spent on
finding out."""

_LEAST_LOSS = 1e-3
"""Of a step's time, below which it makes no difference."""

_PATIENCE_STEPS = 64
"""So long a probe waits for a step without prompt tokens, whose time tells more."""


class Prober:
    """Spaces probes out, and lets rows take turns."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._since = 0
        self._saved = settings.probe_credit
        """What may be spent, in times of a step."""
        self._prompted = 0
        self._spacing = settings.probe_every_steps
        self._promise = math.inf
        self._first = 0

    def restart(self) -> None:
        """What was found no longer holds: the load has changed, or something was drafted."""
        self._since = 0
        self._spacing = self._settings.probe_every_steps
        self._promise = math.inf

    def rows(
        self,
        able: npt.NDArray[np.int64],
        prefill_tokens: int,
        promise: float,
        loss: Callable[[int], float],
    ) -> npt.NDArray[np.int64]:
        """The rows that draft one token each in this step, in which else none would.

        able: those that may. promise: tokens a second of the best draft length over those without
        drafts. loss: what so many drafted tokens add to the step's time, over that time.
        """
        settings = self._settings
        self._since += 1
        self._saved += settings.probe_loss
        self._prompted = self._prompted + 1 if prefill_tokens else 0
        if self._since < self._spacing or 0 < self._prompted < _PATIENCE_STEPS:
            return able[:0]
        if not len(able):
            return able
        count, lost = self._count(len(able), loss)
        if lost > self._saved:
            return able[:0]
        self._saved -= lost
        self._since = 0
        rarer = 1 if promise > _NEWS * self._promise else 2 * self._spacing
        rarer = max(rarer, settings.probe_every_steps)
        self._spacing = min(rarer, settings.probe_rarest_steps)
        self._promise = promise
        turn = (self._first + np.arange(count)) % len(able)
        self._first += count
        chosen: npt.NDArray[np.int64] = able[turn]
        return chosen

    def _count(self, able: int, loss: Callable[[int], float]) -> tuple[int, float]:
        """How many rows to ask, and what that loses: as many as tell the most for the time, within
        what is saved up between the rarest probes. Where that is too little for a single row, so
        much is saved up."""
        settings = self._settings
        most = settings.probe_loss * settings.probe_rarest_steps
        best, lost = 1, max(loss(1), _LEAST_LOSS)
        self._saved = min(self._saved, max(settings.probe_credit, lost))
        count = able
        while count > 1:
            found = max(loss(count), _LEAST_LOSS)
            if found <= most and count * lost > best * found:
                best, lost = count, found
            count //= 2
        return best, lost
