"""What loads were like lately, so that one step alone does not turn the choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LoadMeans", "Mix", "PrefillMeans"]

_Floats = npt.NDArray[np.float64]

_SIZES = 24
"""Classes of prompt chunks, an octave each."""

_RARE = 0.005
"""A class of chunks that makes up less than this share of the steps is left out."""


@dataclass(frozen=True)
class Mix:
    """Prompt tokens beside the rows: numbers of them, and how often each occurs.

    Not their mean: the time of a pass has cliffs, and a mean lies where no pass does.
    """

    tokens: npt.NDArray[np.int64]
    shares: _Floats


class PrefillMeans:
    """How many prompt tokens run beside the rows."""

    def __init__(self, mean_steps: int) -> None:
        self._learnt = 1.0 / mean_steps
        self._shares = [1.0] + [0.0] * (_SIZES - 1)
        self._tokens = [0.0] * _SIZES

    def observe(self, prefill_tokens: int) -> None:
        """A step is going to run with so many."""
        size = min(prefill_tokens.bit_length(), _SIZES - 1)
        self._shares = [share * (1.0 - self._learnt) for share in self._shares]
        self._shares[size] += self._learnt
        known = 1.0 - self._learnt / self._shares[size]
        self._tokens[size] += (1.0 - known) * (prefill_tokens - self._tokens[size])

    def mix(self) -> Mix:
        """What has been usual."""
        kept = [size for size, share in enumerate(self._shares) if share > _RARE]
        shares = np.array([self._shares[size] for size in kept])
        tokens = np.array([round(self._tokens[size]) for size in kept], dtype=np.int64)
        return Mix(tokens, shares / shares.sum())


class LoadMeans:
    """What each draft length would have emitted and taken, averaged over the last steps.

    Where the number of rows changes by more than chance, what was before no longer counts.
    """

    def __init__(self, mean_steps: int) -> None:
        self._mean_steps = mean_steps
        self._steps = 0
        self._rows = 0.0
        self._means: _Floats = np.zeros(0)

    def rates(self, count: int) -> _Floats:
        """What so many draft lengths bring, tokens a millisecond; 0 before anything is known."""
        if self._means.shape != (2, count):
            return np.zeros(count)
        rates: _Floats = self._means[0] / self._means[1]
        return rates

    def observe(self, rows: int, values: _Floats) -> _Floats:
        """One more step with so many rows. Returns the means with it."""
        # Rows that come and go by chance vary by about the root of their number.
        changed = abs(rows - self._rows) > 1 + 2 * self._rows**0.5
        if changed or values.shape != self._means.shape:
            self._steps = 0
        self._steps += 1
        learnt = max(1.0 / self._steps, 1.0 / self._mean_steps)
        if self._steps == 1:
            self._rows, self._means = float(rows), values
        else:
            self._rows += learnt * (rows - self._rows)
            self._means = self._means + learnt * (values - self._means)
        return self._means

    @property
    def fresh(self) -> bool:
        """Whether the last step was the first of a new load."""
        return self._steps == 1
