"""How many drafted tokens to expect accepted: by place in the draft, by who drafts, by request.

The unit is the conditional acceptance q_j: of the steps that accepted the draft's token j - 1, the
share that accepted token j too. A token behind a rejected one says nothing (it is censored), and
steps that drafted fewer tokens neither. S_j = q_1 q_2 ... q_j is how likely token j is to stand,
1 + S_1 + ... + S_K what a step with K drafts emits. (SmartSpec, arXiv 2406.14066, section 4, has
one q for all places and requests.)

For a tree, whose tokens are ordered by likelihood, q_j is the ratio of how often tokens j and j - 1
stand: not a probability then, but S_j means the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftgate.speculation.load import Outcome

__all__ = ["AcceptanceEstimator"]

_Floats = npt.NDArray[np.float64]

_SOURCES = 8
"""More than there are drafters."""

_POOL_HALF_LIFE_ROWS = 1000
"""After so many observed rows what is known of all of them counts half ..."""

_POOL_HALF_LIFE_STEPS = 60
"""... or after so many steps, whichever comes first: at one row a step the load may change too."""

_POOL_ROWS = 64
"""Most rows that one step counts for: a large batch must not erase what smaller ones taught."""

_ROW_FADE = 0.5 ** (1 / 40)
"""What a row keeps of its past at each of its own steps: half of it after 40."""

_PRIOR_RATE = 0.6
"""Conditional acceptance before anything is known (EAGLE heads: 0.5 to 0.8)."""

_PRIOR_COUNT = 4.0
"""How many observations that is worth, for all rows together."""

_ROW_PRIOR_COUNT = 12.0
"""How many of its own a row needs to outweigh the rate of all rows."""

_NEWLY_USED = 1e-3
"""Weight of who drafts for all rows beside who drafted for this one."""

_MOST = 0.995
"""No token is certain, whatever few observations say."""


class AcceptanceEstimator:
    """Discounted counts, of all rows by source and of each row by source."""

    def __init__(self, max_draft_len: int) -> None:
        self.max_draft_len = max_draft_len
        shape = (_SOURCES, max_draft_len)
        self._reached: _Floats = np.zeros(shape)
        self._accepted: _Floats = np.zeros(shape)
        self._used: _Floats = np.zeros(_SOURCES)
        self._rows: dict[int, int] = {}
        """The place of each row below; place 0 is of rows that nothing is known of."""
        self._free: list[int] = []
        self._row_reached: _Floats = np.zeros((1, *shape))
        self._row_accepted: _Floats = np.zeros((1, *shape))
        self._row_used: _Floats = np.zeros((1, _SOURCES))
        self._rates = self._pooled_rates()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count one step. Rows that drafted nothing leave no trace."""
        counted = [o for o in outcomes if o.drafted and o.valid != 0]
        if not counted:
            return
        rows = np.array([self._place(o.row_id) for o in counted])
        sources = np.array([o.source for o in counted])
        used = np.array([not o.shadow for o in counted], dtype=np.float64)
        reached, accepted = self._counts(counted)
        # What says nothing about a source leaves what is known of it as it is.
        self._row_reached[rows, sources] *= _ROW_FADE
        self._row_reached[rows, sources] += reached
        self._row_accepted[rows, sources] *= _ROW_FADE
        self._row_accepted[rows, sources] += accepted
        self._row_used[rows[used > 0]] *= _ROW_FADE
        self._row_used[rows, sources] += used
        weight = min(1.0, _POOL_ROWS / len(counted))
        fade = _fade(weight * np.bincount(sources, minlength=_SOURCES))
        self._reached *= fade[:, None]
        self._accepted *= fade[:, None]
        self._used *= _fade(np.array(weight * used.sum()))
        np.add.at(self._reached, sources, weight * reached)
        np.add.at(self._accepted, sources, weight * accepted)
        np.add.at(self._used, sources, weight * used)
        self._rates = self._pooled_rates()

    def forget(self, row_id: int) -> None:
        """The row has left."""
        place = self._rows.pop(row_id, None)
        if place is not None:
            self._row_reached[place] = 0.0
            self._row_accepted[place] = 0.0
            self._row_used[place] = 0.0
            self._free.append(place)

    @property
    def row_count(self) -> int:
        """How many rows something is known of."""
        return len(self._rows)

    def rates(self) -> _Floats:
        """Conditional acceptance [sources, max_draft_len] over all rows.

        A place that was hardly seen leans to the place before it, the first to the prior.
        """
        return self._rates.copy()

    def seen(self) -> dict[int, _Floats]:
        """`rates` by source, of those that something is known of."""
        known = np.flatnonzero(self._reached[:, 0])
        return {source: self._rates[source] for source in map(int, known)}

    def survival(self, row_ids: Sequence[int]) -> _Floats:
        """How likely each drafted token of each row is to stand: S_j, [rows, max_draft_len].

        A row's sources are taken to draft as often as they did; a new row's as they do for all.
        """
        index = np.array([self._rows.get(row_id, 0) for row_id in row_ids], dtype=int)
        rates = self._row_accepted[index] + _ROW_PRIOR_COUNT * self._rates
        rates /= self._row_reached[index] + _ROW_PRIOR_COUNT
        own = np.cumprod(np.minimum(rates, _MOST, out=rates), axis=-1)
        used = self._row_used[index] + (_NEWLY_USED * self._used + 1e-12)
        used /= used.sum(axis=1, keepdims=True)
        survival: _Floats = (used[:, None, :] @ own)[:, 0]
        return survival

    def _pooled_rates(self) -> _Floats:
        found = np.empty_like(self._reached)
        before: _Floats | float = _PRIOR_RATE
        for place in range(self.max_draft_len):
            accepted = self._accepted[:, place] + _PRIOR_COUNT * before
            before = np.minimum(accepted / (self._reached[:, place] + _PRIOR_COUNT), _MOST)
            found[:, place] = before
        return found

    def _counts(self, outcomes: Sequence[Outcome]) -> tuple[_Floats, _Floats]:
        """[rows, max_draft_len] each: whether the token before stood, and whether it did; 0 where
        that says nothing."""
        stood = np.zeros((len(outcomes), self.max_draft_len + 1))
        stood[:, 0] = 1.0  # what is drafted first follows what is settled
        told = np.zeros((len(outcomes), self.max_draft_len))
        for row, outcome in enumerate(outcomes):
            valid = outcome.drafted if outcome.valid is None else outcome.valid
            told[row, :valid] = 1.0
            for place in outcome.accepted:
                if place < self.max_draft_len:
                    stood[row, place + 1] = 1.0
        return stood[:, :-1] * told, stood[:, 1:] * told

    def _place(self, row_id: int) -> int:
        place = self._rows.get(row_id)
        if place is not None:
            return place
        if not self._free:
            first = len(self._row_used)
            more = max(first, 32)
            self._row_reached = _extended(self._row_reached, more)
            self._row_accepted = _extended(self._row_accepted, more)
            self._row_used = _extended(self._row_used, more)
            self._free = list(range(first + more - 1, first - 1, -1))
        place = self._rows[row_id] = self._free.pop()
        return place


def _fade(rows: _Floats) -> _Floats:
    """What a step that observed so many rows leaves of what was known; all where it was none."""
    halves = np.maximum(rows / _POOL_HALF_LIFE_ROWS, 1 / _POOL_HALF_LIFE_STEPS)
    faded: _Floats = 0.5 ** np.where(rows > 0, halves, 0.0)
    return faded


def _extended(held: _Floats, rows: int) -> _Floats:
    return np.concatenate([held, np.zeros((rows, *held.shape[1:]))])
