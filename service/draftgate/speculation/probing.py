"""When to draft a little although nothing is drafted, to see whether it would pay again."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from draftgate.speculation.settings import GateSettings

__all__ = ["Prober"]

_NEWS = 1.01
"""What drafts promise has to have risen by this factor since the last probe for more to be spent on
finding out."""


class Prober:
    """Spaces probes out, and lets rows take turns."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._since = 0
        self._spacing = settings.probe_every_steps
        self._promise = math.inf
        self._first = 0

    def restart(self) -> None:
        """What was found no longer holds: the load has changed, or something was drafted."""
        self._since = 0
        self._spacing = self._settings.probe_every_steps
        self._promise = math.inf

    def count(self, able: int) -> int:
        """How many rows draft in a probe, of so many that may."""
        return max(1, round(self._settings.probe_share * able))

    def due(self, promise: float, loss: float) -> bool:
        """Whether to probe in this step, in which else nothing would be drafted.

        promise: tokens a second of the best draft length over those without drafts; loss: what the
        probe adds to the step's time, over that time.
        """
        self._since += 1
        affordable = math.ceil(max(loss, 0.0) / self._settings.probe_loss)
        if self._since < max(self._spacing, affordable):
            return False
        self._since = 0
        rarer = 1 if promise > _NEWS * self._promise else 2 * self._spacing
        self._spacing = min(
            max(rarer, self._settings.probe_every_steps), self._settings.probe_rarest_steps
        )
        self._promise = promise
        return True

    def rows(self, able: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Whose turn it is, of the rows that may draft."""
        count = self.count(len(able))
        turn = (self._first + np.arange(count)) % len(able)
        self._first += count
        return able[turn]
