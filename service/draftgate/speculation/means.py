"""What loads were like lately, so that one step alone does not turn the choice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["LoadMeans", "Mix", "PrefillMeans"]

_Floats = npt.NDArray[np.float64]

_ALL = np.ones(1)

_BEGUN = 32
"""Before the first step, so many without prompt tokens are taken to have been."""

_RARE = 0.005
"""An octave of chunks that makes up less than this share of the steps is left out."""


@dataclass(frozen=True)
class Mix:
    """Prompt tokens beside the rows: numbers of them, and how often each occurs.

    Not their mean: the time of a pass has cliffs, and a mean lies where no pass does.
    """

    tokens: list[int]
    shares: _Floats


class PrefillMeans:
    """How many prompt tokens run beside the rows."""

    def __init__(self, mean_steps: int) -> None:
        self._mean_steps = mean_steps
        self._steps = _BEGUN
        self._classes = {0: (1.0, 0.0)}
        """Share of the steps and mean tokens, by their octave."""

    def observe(self, prefill_tokens: int) -> None:
        """A step is going to run with so many."""
        self._steps = min(self._steps + 1, self._mean_steps)
        learnt = 1.0 / self._steps
        octave = prefill_tokens.bit_length()
        for each, (share, tokens) in self._classes.items():
            self._classes[each] = (share * (1.0 - learnt), tokens)
        share, tokens = self._classes.get(octave, (0.0, 0.0))
        share += learnt
        self._classes[octave] = (share, tokens + learnt / share * (prefill_tokens - tokens))

    def mix(self) -> Mix:
        """What has been usual."""
        if len(self._classes) == 1:
            [(_, tokens)] = self._classes.values()
            return Mix([round(tokens)], _ALL)
        kept = [each for each in self._classes.values() if each[0] > _RARE]
        shares = np.array([share for share, _ in kept])
        return Mix([round(tokens) for _, tokens in kept], shares / shares.sum())


class LoadMeans:
    """What each draft length would have emitted and taken, averaged over the last steps.

    Where the number of rows changes by more than chance, what was before no longer counts.
    """

    def __init__(self, mean_steps: int) -> None:
        self._mean_steps = mean_steps
        self._steps = 0
        self._rows = 0.0
        self._means: _Floats = np.zeros((2, 0))

    def begins(self, rows: int) -> bool:
        """Whether a step with so many rows is the first of a new load."""
        # Rows that come and go by chance vary by about the root of their number.
        return self._steps == 0 or abs(rows - self._rows) > 1 + 2 * self._rows**0.5

    def observe(self, rows: int, values: _Floats, steps: int = 1) -> _Floats:
        """So many more steps, all alike. values: [tokens and milliseconds, draft lengths]. Returns
        their means."""
        if self.begins(rows) or values.shape != self._means.shape:
            self._steps, self._rows, self._means = steps, float(rows), values
            return values
        self._steps += steps
        learnt = steps / min(self._steps, max(self._mean_steps, steps))
        self._rows += learnt * (rows - self._rows)
        self._means = self._means + learnt * (values - self._means)
        return self._means
