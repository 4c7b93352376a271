"""What each draft length promises: expected tokens, and what a step takes by the corrected table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.allocation import Slots
from draftgate.speculation.limits import RowLimits
from draftgate.speculation.load import Load
from draftgate.speculation.means import LoadMeans, PrefillMeans
from draftgate.speculation.pass_times import CorrectedTimes
from draftgate.speculation.settings import GateSettings

__all__ = ["Candidate", "Weighed", "Weigher"]

_Floats = npt.NDArray[np.float64]

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
    slots: Slots | None
    """The same in order; None: all rows draft alike."""

    def expected_tokens(self, lens: npt.NDArray[np.int64]) -> float:
        """Emitted by a step in which the rows draft so many tokens."""
        drafted = _PLACES[: self.survival.shape[1]] <= lens[:, None]
        return len(lens) + float(self.survival[drafted].sum())


class Weigher:
    """Weighs step by step."""

    def __init__(
        self,
        times: CorrectedTimes,
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
        survival = self._acceptance.survival(limits.row_ids)
        able = _PLACES[: survival.shape[1]] <= limits.lens[:, None]
        slots = None
        if self._by_row:
            slots = Slots.of(survival, able)
            tokens, times_ms = slots.best(self._times, load, lens, mix)
        else:
            drafted = _running(able)[lens]
            tokens = rows + _running(np.where(able, survival, 0.0))[lens]
            chunks = np.array([load.prefill_tokens, *mix.tokens])
            share = drafted / np.maximum(rows * np.array(lens), 1)
            in_pass = (rows + drafted)[:, None] + chunks
            times_ms = self._times.ms(lens, in_pass, load.kv_tokens, share[:, None])
            tokens = np.broadcast_to(tokens[:, None], times_ms.shape)
        usual = np.stack([tokens[:, 1:] @ mix.shares, times_ms[:, 1:] @ mix.shares])
        means = self._means.observe(rows, usual)
        found = zip(lens, tokens[:, 0].tolist(), times_ms[:, 0].tolist(), *means.tolist())
        candidates = tuple(Candidate(*each) for each in found)
        return Weighed(candidates, self._means.fresh, survival, slots)


def _running(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """[places + 1]: sums over all rows of the first so many places, of [rows, places]."""
    return np.cumsum([0.0, *values.sum(axis=0)])
