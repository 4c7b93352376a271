"""Correcting a cost table by the steps that really ran.

Each measured step gives a ratio to what the table said. Ratios are averaged with forgetting by how
many tokens were in the pass, a few buckets an octave, apart for steps with and without drafts. What
one bucket has learned holds in part for its neighbours, which may never have run: the less the
further away. So a table that is wrong above some number of tokens is put right there, not below.

A machine may also become slower as a whole, for a second or for an hour. Steps of a bucket that is
well known tell of that at once, in one factor on all times: it turns no choice. Only what lasts is
then learned of the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["EDGES", "CostCorrection"]

_PER_OCTAVE = 3
_BUCKETS = 16 * _PER_OCTAVE
"""Up to 65,536 tokens."""

_LEARNT = 0.03
"""Weight of a new ratio once a bucket has seen many."""

_KNOWN = 8.0
"""After so many observations of a bucket, what differs from them is the whole machine's speed."""

_DRIFT_LEARNT = 0.2
"""Weight of a step for that speed."""

_LOWEST, _HIGHEST = 1 / 3, 3.0
"""A step further off than this is a hiccup of the machine: it counts as this far."""

_HICCUP = 2.0
"""The same of a bucket that is well known, over what is usual there."""

_PRIOR = 0.3
"""Weight, in observations, of the table being right."""

_PLAIN_PRIOR = 2.0
"""The same where steps without drafts did not run, and the nearest with fewer tokens has to tell: a
lone one, however long ago, may have been a hiccup."""

_REACH = 1.5
"""Over so many buckets what was learned falls to 1 / e for a neighbour."""

_OTHER = 0.25
"""Weight of steps with drafts for those without, and the other way round."""

_HEARSAY = 0.3
"""Most observations that all of its neighbours count for beside a bucket's own."""

_MOST = 40.0
"""Most observations that a bucket counts for."""

_FADE = 0.5 ** (1 / 1000)
"""Of a bucket's observations, what is left after a step elsewhere: half after 1000."""


class CostCorrection:
    """Factors on a table's times."""

    def __init__(self) -> None:
        self._ratios = np.ones((2, _BUCKETS))
        self._seen = np.zeros((2, _BUCKETS))
        self._factors = np.ones((2, _BUCKETS))
        self._plain_factors = np.ones(_BUCKETS)
        self._drift = 1.0
        """How much slower the machine is at present than in the steps that were learned from."""

    def observe(
        self, tokens: int, *, drafted: bool, expected_ms: float, measured_ms: float
    ) -> None:
        """A step with so many tokens in its pass took `measured_ms` where the table says
        `expected_ms`."""
        kind, bucket = int(drafted), _bucket(tokens)
        ratio = min(max(measured_ms / expected_ms, _LOWEST), _HIGHEST)
        self._seen *= _FADE
        seen = min(self._seen[kind, bucket] + 1.0, _MOST)
        self._seen[kind, bucket] = seen
        known = self._ratios[kind, bucket]
        if seen > _KNOWN:
            usual = known * self._drift
            ratio = min(max(ratio, usual / _HICCUP), usual * _HICCUP)
            self._drift *= (ratio / known / self._drift) ** _DRIFT_LEARNT
        else:
            ratio /= self._drift
        self._ratios[kind, bucket] += max(_LEARNT, 1 / seen) * (ratio - known)
        self._refresh()

    def factor(self, tokens: int, *, drafted: bool) -> float:
        """What to multiply the table's time of such a step with."""
        return self._drift * float(self._factors[int(drafted), _bucket(tokens)])

    def factors(
        self, tokens: npt.NDArray[np.int64], drafted: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """`factor` for arrays that fit each other."""
        buckets = _BUCKET_OF.take(tokens, mode="clip")
        found: npt.NDArray[np.float64] = self._factors.take(buckets + _BUCKETS * drafted)
        return self._drift * found

    def plain_factors(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """What to multiply a plain step's time with, by what plain steps alone showed: the table
        may be wrong for steps with drafts only, and plain ones with many tokens are rare."""
        found: npt.NDArray[np.float64] = self._plain_factors[_BUCKET_OF.take(tokens, mode="clip")]
        return self._drift * found

    def learned(self) -> Sequence[tuple[int, bool, float, float]]:
        """What has been seen: fewest tokens of the bucket, whether drafted, ratio, observations."""
        return [
            (_least(bucket), bool(kind), float(self._ratios[kind, bucket]), float(seen))
            for (kind, bucket), seen in np.ndenumerate(self._seen)
            if seen
        ]

    def _refresh(self) -> None:
        """Means of the ratios' logarithms: a bucket's own, and some of what its neighbours say."""
        seen, logs = self._seen, np.log(self._ratios) * self._seen
        heard, said = _heard(seen), _heard(logs)
        weight = np.minimum(heard, _HEARSAY)
        total = logs + weight * said / (heard + _PRIOR)
        factors = np.exp(total / np.maximum(seen + weight, 1e-9))
        # What never ran, or long ago, is not thought dearer than the nearest with fewer tokens that
        # did: where the table begins to be wrong only a try tells.
        known = np.minimum(seen, 1.0)
        ran = np.maximum.accumulate(np.where(seen > 0, np.arange(_BUCKETS), -1), axis=1)
        # Of each bucket the ratio of the nearest with as many or fewer tokens that ran: with or
        # without drafts as asked, else the other way; infinite where none has.
        ratios = self._ratios.copy()
        ratios[0] = np.exp(logs[0] / (seen[0] + _PLAIN_PRIOR))
        nearest = np.where(ran >= 0, np.take_along_axis(ratios, ran, axis=1), np.inf)
        below = np.where(ran >= 0, nearest, nearest[::-1])
        unknown = np.minimum(factors, below)
        # Where only steps with drafts ran, they may be what the table is wrong about.
        unknown[0] = np.where(ran[0] >= 0, nearest[0], unknown[0])
        self._factors = known * factors + (1 - known) * unknown
        self._plain_factors = np.where(ran[0] >= 0, nearest[0], 1.0)


def _least(bucket: int) -> int:
    return math.ceil(2 ** (bucket / _PER_OCTAVE))


EDGES = np.array([_least(bucket) for bucket in range(_BUCKETS)])
"""Fewest tokens of each bucket."""

_BUCKET_OF = np.maximum(EDGES.searchsorted(np.arange(EDGES[-1] + 1), side="right") - 1, 0)
"""The bucket of a number of tokens; beyond the end the last."""


def _bucket(tokens: int) -> int:
    return int(_BUCKET_OF[min(tokens, len(_BUCKET_OF) - 1)])


_STEPS = np.arange(_BUCKETS)
_NEAR = np.exp(-np.abs(_STEPS[:, None] - _STEPS) / _REACH)
"""How much buckets say about each other."""


def _heard(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What is said of each bucket, of steps without and with drafts [2, buckets], by all others.

    Products so small that no threads are woken for them, which would fight with the engine's.
    """
    near = values @ _NEAR
    found: npt.NDArray[np.float64] = near - values + _OTHER * near[::-1]
    return found
