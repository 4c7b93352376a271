"""What each draft length promises: expected tokens, and what a step takes by the corrected table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.allocation import Allotment, Slots
from draftgate.speculation.limits import RowLimits
from draftgate.speculation.load import Load
from draftgate.speculation.means import LoadMeans, PrefillMeans
from draftgate.speculation.pass_times import PassTimes
from draftgate.speculation.settings import GateSettings

__all__ = ["Candidate", "Weighed", "Weigher"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_PLACES = np.arange(1, 257)
"""Places of a draft."""


@dataclass(frozen=True)
class Candidate:
    """A draft length and what it promises."""

    draft_len: int
    tokens: float
    """Expected from all rows together, in the step that is about to run."""
    step_ms: float
    """Expected of that step."""
    mean_tokens: float
    """The same over the last steps, had they all had this draft length ..."""
    mean_ms: float
    """... with prompt chunks as often as they come."""

    @property
    def tokens_per_ms(self) -> float:
        """What the choice is by."""
        return self.mean_tokens / self.mean_ms


@dataclass(frozen=True)
class Weighed:
    """What was found of a step."""

    candidates: tuple[Candidate, ...]
    """All draft lengths that may be chosen, the shortest first."""
    load_changed: bool
    """Whether there are so many more or fewer rows that what was before no longer counts."""
    survival: _Floats
    """[rows, places]: how likely each row's drafts are to stand."""
    most: _Ints
    """[rows]: how far each may draft."""
    allotment: Allotment | None
    """None: all rows draft alike."""

    def lens(self, draft_len: int) -> _Ints:
        """[rows]: what each row drafts with this draft length."""
        if self.allotment is None:
            return np.minimum(self.most, draft_len)
        return self.allotment.lens(draft_len, 0, len(self.most))

    def expected_tokens(self, lens: _Ints) -> float:
        """Emitted by a step in which the rows draft so many tokens."""
        drafted = _PLACES[: self.survival.shape[1]] <= lens[:, None]
        return len(lens) + float((self.survival * drafted).sum())


class Weigher:
    """Weighs step by step."""

    def __init__(
        self,
        times: PassTimes,
        acceptance: AcceptanceEstimator,
        draft_lens: Sequence[int],
        settings: GateSettings,
    ) -> None:
        self._times = times
        self._acceptance = acceptance
        self._lens = [k for k in draft_lens if k in times.table.curves]
        self._by_row = settings.by_row
        self._prefill = PrefillMeans(settings.prefill_mean_steps)
        self._means = LoadMeans(settings.mean_steps)

    def weigh(self, load: Load, limits: RowLimits, highest: int) -> Weighed:
        """load: with rows. highest: the longest that may be chosen."""
        rows = len(load.rows)
        lens = [k for k in self._lens if k <= highest]
        self._prefill.observe(load.prefill_tokens)
        mix = self._prefill.mix()
        chunks = np.array([load.prefill_tokens, *mix.tokens], dtype=np.int64)
        survival = self._acceptance.survival(limits.row_ids)
        allotment = None
        if self._by_row:
            slots = Slots.of(survival, limits.lens)
            rates = self._means.rates(len(lens))
            allotment = Allotment.best(slots, self._times, load, lens, chunks, rates)
            tokens, times_ms = allotment.tokens, allotment.times_ms
        else:
            able = limits.lens[:, None] >= _PLACES[: survival.shape[1]]
            drafted = _running(able)[lens].astype(np.int64)
            share = drafted / np.maximum(rows * np.array(lens), 1)
            in_pass = (rows + drafted)[:, None] + chunks
            times_ms = self._times.ms(lens, in_pass, load.kv_tokens, share[:, None])
            tokens = np.empty_like(times_ms)
            tokens[:] = (rows + _running(survival * able)[lens])[:, None]
        means = self._means.observe(
            rows, np.stack([tokens[:, 1:] @ mix.shares, times_ms[:, 1:] @ mix.shares])
        )
        found = zip(
            lens,
            tokens[:, 0].tolist(),
            times_ms[:, 0].tolist(),
            *means.tolist(),
            strict=True,
        )
        candidates = tuple([Candidate(*each) for each in found])
        return Weighed(candidates, self._means.fresh, survival, limits.lens, allotment)


def _running(values: npt.NDArray[np.generic]) -> _Floats:
    """[places + 1]: sums over all rows of the first so many places, of [rows, places]."""
    found = np.zeros(values.shape[1] + 1)
    np.cumsum(values.sum(axis=0), out=found[1:])
    return found
