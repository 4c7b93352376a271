"""A cost table as arrays: the times of many passes at once, as a step's decision needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftgate.speculation.correction import CostCorrection
from draftgate.speculation.costs import CostTable

__all__ = ["CorrectedTimes", "PassTimes"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_SPAN = 1 << 24
"""More tokens than any pass has. The curves lie one behind the other on one line, so far apart."""


class PassTimes:
    """`CostTable.step_ms` for arrays."""

    def __init__(self, table: CostTable) -> None:
        self.draft_lens = table.draft_lens
        self._kv_ms = np.array([table.curves[k].kv_us / 1e3 for k in self.draft_lens])
        self._drafting_ms = np.array([table.drafting_ms[k] for k in self.draft_lens])
        tokens: list[int] = []
        times_ms: list[float] = []
        for number, draft_len in enumerate(self.draft_lens):
            curve = table.curves[draft_len]
            points = [0, *curve.tokens, _SPAN - 1]
            tokens += [number * _SPAN + point for point in points]
            times_ms += [curve.base_ms(point) for point in points]
        self._tokens = np.array(tokens, dtype=np.float64)
        self._times_ms = np.array(times_ms)

    def ms(self, place: _Ints, tokens: _Floats, kv_tokens: int, share: _Floats) -> _Floats:
        """place: of the draft length in `draft_lens`. All arrays have one shape."""
        base_ms: _Floats = np.interp(tokens + place * _SPAN, self._tokens, self._times_ms)
        plain_ms = np.interp(tokens, self._tokens, self._times_ms)
        lacking_ms = np.maximum(plain_ms + self._drafting_ms[place] - base_ms, 0.0)
        return base_ms + (1.0 - share) * lacking_ms + kv_tokens * self._kv_ms[place]


class CorrectedTimes:
    """What passes take by a table and by what steps showed of it."""

    def __init__(self, table: CostTable, correction: CostCorrection) -> None:
        self.table = table
        self.correction = correction
        self._times = PassTimes(table)
        self.points = np.unique([t for curve in table.curves.values() for t in curve.tokens])
        """Tokens at which a curve of the table has a point."""

    def ms(
        self, draft_lens: Sequence[int], tokens: _Floats, kv_tokens: int, share: _Floats
    ) -> _Floats:
        """[draft lengths, any]: of passes with so many tokens. share: as of `CostTable.step_ms`."""
        places = np.searchsorted(self._times.draft_lens, draft_lens)
        places = np.broadcast_to(places.reshape(-1, *[1] * (tokens.ndim - 1)), tokens.shape)
        factors = self.correction.factors(tokens, places > 0)
        return factors * self._times.ms(places, tokens, kv_tokens, share)

    def step_ms(self, draft_len: int, tokens: int, kv_tokens: int, share: float) -> float:
        """Of one pass."""
        factor = self.correction.factor(tokens, drafted=draft_len > 0)
        return factor * self.table.step_ms(draft_len, max(tokens, 1), kv_tokens, share)

    def observe(
        self, draft_len: int, tokens: int, kv_tokens: int, share: float, measured_ms: float
    ) -> None:
        """Such a pass took so long."""
        self.correction.observe(
            tokens,
            drafted=draft_len > 0,
            expected_ms=self.table.step_ms(draft_len, tokens, kv_tokens, share),
            measured_ms=measured_ms,
        )
