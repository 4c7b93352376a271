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

_PLACES = np.arange(257)

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
        self._pooled: _Floats = np.zeros((2, *shape))
        """Steps that reached a place, and steps that accepted it: [2, sources, places]."""
        self._used: _Floats = np.zeros(_SOURCES)
        self._rows: dict[int, int] = {}
        """The place of each row below; place 0 is of rows that nothing is known of."""
        self._free: list[int] = []
        self._counts: _Floats = np.zeros((1, 2, *shape))
        """The same of each row."""
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
        fresh = self._fresh(counted)
        weight = min(1.0, _POOL_ROWS / len(counted))
        past = self._counts[rows, :, sources]
        self._compare(past, fresh, self._rates[sources], weight)
        # What says nothing about a source leaves what is known of it as it is.
        self._counts[rows, :, sources] = past * _ROW_FADE + fresh
        self._row_used[rows[used > 0]] *= _ROW_FADE
        self._row_used[rows, sources] += used
        by_source = (sources == _ALL_SOURCES).astype(np.float64)  # [sources, counted]
        summed = (by_source @ fresh.transpose(1, 0, 2)) * weight
        # Nor does what says nothing about a place.
        fade = _fade(weight * by_source.sum(axis=1))[:, None]
        self._pooled *= np.where(summed[0] > 0, fade, 1.0)
        self._pooled += summed
        self._used *= _fade(np.array(weight * used.sum()))
        self._used += weight * (by_source @ used)
        self._known = np.flatnonzero(self._pooled[0, :, 0])
        for source in self._known.tolist():
            self._pool(source)
        self._foresee()

    def forget(self, row_id: int) -> None:
        """The row has left."""
        place = self._rows.pop(row_id, None)
        if place is not None:
            self._counts[place] = 0.0
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
        rates = self._counts[:, 1, source] + self._row_prior_count * self._rates[source]
        rates /= self._counts[:, 0, source] + self._row_prior_count
        found: _Floats = np.minimum(rates, _MOST).cumprod(axis=1)
        return found

    def _compare(self, past: _Floats, fresh: _Floats, pooled: _Floats, weight: float) -> None:
        """See how much a row's past says about its new outcomes (empirical Bayes).

        With rates q of the rows around p, a row that had a of n accepted has a new outcome x with
        E[(x - p) (a - n p)] = n Var(q). Where that is Var(q) = p (1 - p) / (c + 1), a row's own
        rate is best estimated as (a + c p) / (n + c).
        """
        beyond = past[:, 1] - past[:, 0] * pooled
        shared = float(((fresh[:, 1] - fresh[:, 0] * pooled) * beyond).sum())
        varied = float((fresh[:, 0] * past[:, 0] * (pooled - pooled * pooled)).sum())
        fade = float(_fade(np.array(weight * len(fresh)))) ** _SPREAD_FADE
        self._shared = fade * self._shared + weight * shared
        self._varied = fade * self._varied + weight * varied
        begun = _SPREAD_WEIGHT / (_ROW_PRIOR_COUNT + 1)
        ratio = (self._shared + begun) / (self._varied + _SPREAD_WEIGHT)
        least, most = _ROW_PRIOR_COUNTS
        self._row_prior_count = 1 / min(max(ratio, 1 / (most + 1)), 1 / (least + 1)) - 1

    def _pool(self, source: int) -> None:
        """Find the rates of a source anew."""
        before, rates = _PRIOR_RATE, []
        for reached, accepted in self._pooled[:, source].T.tolist():
            before = min((accepted + _PRIOR_COUNT * before) / (reached + _PRIOR_COUNT), _MOST)
            rates.append(before)
        self._rates[source] = rates

    def _fresh(self, outcomes: Sequence[Outcome]) -> _Floats:
        """[outcomes, 2, places]: whether the token before stood, and whether it did; 0 where that
        says nothing."""
        longest = self.max_draft_len
        valid = np.array([o.drafted if o.valid is None else o.valid for o in outcomes])
        depth = np.array([len(o.accepted) for o in outcomes])
        stood = _PLACES[: longest + 1] <= depth[:, None]
        for row, outcome in enumerate(outcomes):
            accepted = outcome.accepted
            if accepted and accepted[-1] != len(accepted) - 1:
                # A branch of a tree, which leaves places out.
                stood[row, 1:] = False
                stood[row, [place + 1 for place in accepted if place < longest]] = True
        found = np.empty((len(outcomes), 2, longest))
        told = _PLACES[:longest] < valid[:, None]
        np.logical_and(stood[:, :-1], told, out=found[:, 0])
        np.logical_and(stood[:, 1:], told, out=found[:, 1])
        return found

    def _place(self, row_id: int) -> int:
        place = self._rows.get(row_id)
        if place is not None:
            return place
        if not self._free:
            first = len(self._row_used)
            more = max(first, 32)
            self._counts = _extended(self._counts, more)
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
