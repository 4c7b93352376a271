"""How far steps run over the time that is expected of them."""

from __future__ import annotations

__all__ = ["Overrun"]

_SHARE = 0.005
"""Of all steps, so many may take longer than is said here."""

_LEARNT = 0.04
"""How fast what is said moves. It goes up by this for a step that took longer and, for one that did
not, down by so little that it rests at that quantile (Robbins and Monro, 1951)."""

_SLACK = 1.001
"""By so little more no step takes longer: it is rounding."""

_MOST = 2.0
"""A machine that does worse keeps no ceiling."""


class Overrun:
    """The 99.5th percentile of measured over expected time."""

    def __init__(self) -> None:
        self.factor = 1.0
        """To multiply an expected time with for one that a step hardly ever takes longer than."""

    def observe(self, expected_ms: float, measured_ms: float) -> None:
        """A step was expected to take so long, above 0, and took so long."""
        over = measured_ms > _SLACK * self.factor * expected_ms
        moved = self.factor + _LEARNT * (over - _SHARE)
        self.factor = min(max(moved, 1.0), _MOST)
