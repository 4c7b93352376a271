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

_ALL_SOURCES = np.arange(_SOURCES)[:, None]

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
"""How many of its own a row needs to outweigh the rate of all rows, to begin with: the less they
prove alike, the fewer."""

_ROW_PRIOR_COUNTS = (4.0, 100.0)
"""At least and at most."""

_SPREAD_WEIGHT = 25.0
"""What the beginning is worth, in variances of one observation."""

_SPREAD_FADE = 0.25
"""Of that, by so much less is forgotten than of the rates."""

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
        self._rates: _Floats = np.full(shape, _PRIOR_RATE)
        self._known = np.zeros(0, dtype=np.int64)
        """The sources that something is known of."""
        self._survival: _Floats = _PRIOR_RATE ** np.arange(1.0, max_draft_len + 1)[None]
        """[rows]: as `survival`, by their place."""
        self._shared = self._varied = 0.0
        """What new outcomes of rows have in common with their past, beyond that of all rows; and
        what they would if no two rows were alike."""
        self._row_prior_count = _ROW_PRIOR_COUNT

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count one step. Rows that drafted nothing leave no trace."""
        counted = [o for o in outcomes if o.drafted and o.valid != 0]
        if not counted:
            return
        rows = np.array([self._place(o.row_id) for o in counted])
        sources = np.array([o.source for o in counted])
        used = np.array([not o.shadow for o in counted], dtype=np.float64)
        reached, accepted = self._counts(counted)
        weight = min(1.0, _POOL_ROWS / len(counted))
        by_source = (sources == _ALL_SOURCES).astype(np.float64)  # [sources, counted]
        fade = _fade(weight * by_source.sum(axis=1))
        self._compare(rows, sources, reached, accepted, weight)
        # What says nothing about a source leaves what is known of it as it is.
        self._row_reached[rows, sources] *= _ROW_FADE
        self._row_reached[rows, sources] += reached
        self._row_accepted[rows, sources] *= _ROW_FADE
        self._row_accepted[rows, sources] += accepted
        self._row_used[rows[used > 0]] *= _ROW_FADE
        self._row_used[rows, sources] += used
        # Nor does what says nothing about a place.
        fresh = by_source @ reached
        fade = np.where(fresh > 0, fade[:, None], 1.0)
        self._reached = self._reached * fade + weight * fresh
        self._accepted = self._accepted * fade + weight * (by_source @ accepted)
        self._used *= _fade(np.array(weight * used.sum()))
        self._used += weight * (by_source @ used)
        self._known = np.flatnonzero(self._reached[:, 0])
        for source in self._known.tolist():
            self._pool(source)
        self._foresee()

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
        return {source: self._rates[source].copy() for source in self._known.tolist()}

    def survival(self, row_ids: Sequence[int]) -> _Floats:
        """How likely each drafted token of each row is to stand: S_j, [rows, max_draft_len].

        A row's sources are taken to draft as often as they did; a new row's as they do for all.
        """
        places = self._rows
        found: _Floats = self._survival[[places.get(row_id, 0) for row_id in row_ids]]
        return found

    def _foresee(self) -> None:
        """Find `survival` for all rows anew, so that a decision has it at hand."""
        if len(self._known) == 1:
            self._survival = self._alone(int(self._known[0]))
            return
        own = np.stack([self._alone(source) for source in self._known.tolist()])
        used = self._row_used[:, self._known] + (_NEWLY_USED * self._used[self._known] + 1e-12)
        shares = used.T / used.sum(axis=1)
        self._survival = (shares[..., None] * own).sum(axis=0)

    def _alone(self, source: int) -> _Floats:
        """The same if all drafts were of one source."""
        rates = self._row_accepted[:, source] + self._row_prior_count * self._rates[source]
        rates /= self._row_reached[:, source] + self._row_prior_count
        return np.minimum(rates, _MOST).cumprod(axis=1)

    def _compare(
        self,
        rows: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        reached: _Floats,
        accepted: _Floats,
        weight: float,
    ) -> None:
        """See how much a row's past says about its new outcomes (empirical Bayes).

        With rates q of the rows around p, a row that had a of n accepted has a new outcome x with
        E[(x - p) (a - n p)] = n Var(q). Where that is Var(q) = p (1 - p) / (c + 1), a row's own
        rate is best estimated as (a + c p) / (n + c).
        """
        pooled = self._rates[sources]
        past = self._row_reached[rows, sources]
        beyond = self._row_accepted[rows, sources] - past * pooled
        shared = ((accepted - reached * pooled) * beyond).sum()
        varied = (reached * past * pooled * (1 - pooled)).sum()
        fade = float(_fade(np.array(weight * len(rows)))) ** _SPREAD_FADE
        self._shared = fade * self._shared + weight * float(shared)
        self._varied = fade * self._varied + weight * float(varied)
        begun = _SPREAD_WEIGHT / (_ROW_PRIOR_COUNT + 1)
        ratio = (self._shared + begun) / (self._varied + _SPREAD_WEIGHT)
        least, most = _ROW_PRIOR_COUNTS
        self._row_prior_count = 1 / min(max(ratio, 1 / (most + 1)), 1 / (least + 1)) - 1

    def _pool(self, source: int) -> None:
        """Find the rates of a source anew."""
        before = _PRIOR_RATE
        for place in range(self.max_draft_len):
            accepted = float(self._accepted[source, place]) + _PRIOR_COUNT * before
            before = min(accepted / (float(self._reached[source, place]) + _PRIOR_COUNT), _MOST)
            self._rates[source, place] = before

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
