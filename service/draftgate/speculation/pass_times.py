"""What passes take by a cost table and by what steps showed of it; many passes at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftgate.speculation.correction import EDGES, CostCorrection
from draftgate.speculation.costs import CostTable

__all__ = ["PassTimes"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_SPAN = 1 << 26
"""More tokens than any pass has. The curves lie one behind the other on one line, so far apart."""


class PassTimes:
    """Corrected times."""

    def __init__(self, table: CostTable, correction: CostCorrection) -> None:
        self.table = table
        self.correction = correction
        self.bounds = np.unique([*(EDGES - 1), *_points(table, table.draft_lens)]).astype(np.int64)
        """Tokens of a pass behind which its time may take a leap."""
        self._place = {draft_len: place for place, draft_len in enumerate(table.draft_lens)}
        self._kv_ms = np.array([table.curves[k].kv_us / 1e3 for k in table.draft_lens])
        self._full = _Line([_full(table, draft_len) for draft_len in table.draft_lens])
        alone = np.array(table.draft_lens) + 1
        self._alone_ms = self._full.at(np.arange(len(alone)), alone)
        """Of one row with each draft length, and of as many tokens without drafts."""
        self._plain_alone_ms = self._full.at(np.zeros_like(alone), alone)

    def places(self, draft_lens: Sequence[int]) -> _Ints:
        """What `ms` knows these draft lengths by."""
        return np.array([self._place[k] for k in draft_lens])

    def ms(self, places: _Ints, tokens: _Ints, kv_tokens: int, share: _Floats | None) -> _Floats:
        """Of passes with so many tokens, at least 1.

        places: of their draft lengths, in a shape that fits `tokens`. share: as of
        `CostTable.step_ms`, in one that fits too; None: all rows draft all. What a table says of
        steps with drafts may be wrong while the rest is right, so either is corrected by its own.
        """
        factors = self.correction.factors(tokens, places > 0)
        base_ms = self._full.at(places, tokens)
        times_ms: _Floats = (base_ms + kv_tokens * self._kv_ms[places]) * factors
        if share is not None:
            plain = np.zeros_like(places)
            lacking_ms = self._full.at(plain, tokens) - self._plain_alone_ms[places]
            lacking_ms *= self.correction.plain_factors(tokens)
            lacking_ms -= factors * (base_ms - self._alone_ms[places])
            times_ms += (places > 0) * (1.0 - share) * np.maximum(lacking_ms, 0.0)
        return times_ms

    def step_ms(self, draft_len: int, tokens: int, kv_tokens: int, share: float) -> float:
        """Of one pass."""
        tokens = max(tokens, 1)
        return self.table.step_ms(
            draft_len,
            tokens,
            kv_tokens,
            share,
            factor=self.correction.factor(tokens, drafted=draft_len > 0),
            plain_factor=float(self.correction.plain_factors(np.array(tokens))),
        )

    def observe(
        self, draft_len: int, tokens: int, kv_tokens: int, share: float, measured_ms: float
    ) -> None:
        """Such a pass took so long."""
        drafted = draft_len > 0
        known = self.correction.factor(tokens, drafted=drafted)
        expected_ms = self.step_ms(draft_len, tokens, kv_tokens, share) / known
        self.correction.observe(
            tokens, drafted=drafted, expected_ms=expected_ms, measured_ms=measured_ms
        )


class _Line:
    """Curves of straight lines."""

    def __init__(self, curves: Sequence[Sequence[tuple[float, float]]]) -> None:
        """curves: points (tokens, milliseconds), rising; beyond the last its slope."""
        placed: list[tuple[float, float]] = []
        for place, points in enumerate(curves):
            (x, y), (before_x, before_y) = points[-1], points[-2]
            end = y + (y - before_y) / (x - before_x) * (_SPAN / 2 - x)
            points = [(-1.0, points[0][1]), *points, (_SPAN / 2, end)]
            placed += [(place * _SPAN + x, y) for x, y in points]
        self._tokens, self._times_ms = np.array(placed).T.copy()

    def at(self, places: _Ints, tokens: _Ints) -> _Floats:
        """places: which curve."""
        found: _Floats = np.interp(tokens + places * _SPAN, self._tokens, self._times_ms)
        return found


def _points(table: CostTable, draft_lens: Sequence[int]) -> list[float]:
    """Where these curves have points, and one beyond, where their last slopes hold."""
    known = {float(tokens) for k in draft_lens for tokens in table.curves[k].tokens}
    return [*sorted(known), max(known) + 1.0]


def _full(table: CostTable, draft_len: int) -> list[tuple[float, float]]:
    curve = table.curves[draft_len]
    return [(tokens, curve.base_ms(tokens)) for tokens in _points(table, [draft_len])]
