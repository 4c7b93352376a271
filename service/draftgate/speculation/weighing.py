"""What each draft length promises: expected tokens, and a step's time by the corrected table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.allocation import Allotment, Slots
from draftgate.speculation.limits import RowLimits
from draftgate.speculation.load import Load
from draftgate.speculation.means import LoadMeans, Mix, PrefillMeans
from draftgate.speculation.pass_times import PassTimes
from draftgate.speculation.settings import GateSettings

__all__ = ["Candidate", "Plan", "Weighed", "Weigher"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]

_PLACES = np.arange(1, 257)
"""Places of a draft."""

_ALLOT_EVERY = 64
"""After so many steps it is found out anew what each draft length gains by allotting drafts ..."""

_MOVED = 0.03
"""... or as soon as what a row is expected to emit differs by this share from what it was then."""

_ROUNDS = 2
"""How often the rate that budgets are found by is put right by what they bring."""

_WORTH = 1.002
"""Where that is less, all rows draft alike: the time to decide is worth more."""


class Candidate(NamedTuple):
    """A draft length and what it promises."""

    draft_len: int
    tokens: float
    """Expected from all rows together, in the step that is about to run, if they draft alike."""
    step_ms: float
    """Expected of that step."""
    mean_tokens: float
    """The same over the last steps, had they all had this draft length, with drafts allotted ..."""
    mean_ms: float
    """... and prompt chunks as often as they come."""

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


class Plan(NamedTuple):
    """What to draft in a step."""

    lens: _Ints
    """[rows]"""
    tokens: float
    """Expected of the step."""
    step_ms: float
    """Expected; 0 where no costs are known."""


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
        self._lengths = np.array(self._lens)
        self._places = times.places(self._lens)[:, None]
        self._by_row = settings.by_row
        self._prefill = PrefillMeans(settings.prefill_mean_steps)
        self._means = LoadMeans(settings.mean_steps)
        self._gains: _Floats = np.ones((2, 0))
        """Tokens and milliseconds with drafts allotted over those without, by draft length."""
        self._allotted = 0
        """Steps since."""
        self._allotted_for: _Floats = np.ones(0)
        """Expected tokens of a row at that time, by draft length."""
        self._passed = 0
        """Steps since the last that was weighed."""

    def weigh(self, load: Load, limits: RowLimits, highest: int) -> Weighed:
        """load: with rows. highest: the longest that may be chosen."""
        rows = len(load.rows)
        lens = [k for k in self._lens if k <= highest]
        self._prefill.observe(load.prefill_tokens)
        mix = self._prefill.mix()
        survival = self._acceptance.survival(limits.row_ids)
        tokens, times_ms = self._alike(load, limits, lens, mix, survival)
        values = np.empty((2, len(lens)))
        values[0] = tokens
        np.matmul(times_ms[:, 1:], mix.shares, out=values[1])
        changed = self._means.begins(rows)
        if self._by_row:
            self._allotted += 1 + self._passed
            if changed or self._allotted >= _ALLOT_EVERY or self._has_moved(tokens / rows):
                self._allot(load, limits, lens, mix, survival, values)
            values *= self._gains
        means = self._means.observe(rows, values, 1 + self._passed).tolist()
        self._passed = 0
        found = zip(lens, tokens.tolist(), times_ms[:, 0].tolist(), *means, strict=True)
        candidates = tuple([Candidate(*each) for each in found])
        return Weighed(candidates, changed, survival)

    def pass_by(self, load: Load) -> None:
        """A step runs without being weighed: it is taken to be like the next that is."""
        self._prefill.observe(load.prefill_tokens)
        self._passed += 1

    def plan(self, load: Load, limits: RowLimits, weighed: Weighed, chosen: Candidate) -> Plan:
        """What to draft with this draft length."""
        draft_len = chosen.draft_len
        if not (self._by_row and draft_len and self._worth(self._lens.index(draft_len))):
            return Plan(np.minimum(limits.lens, draft_len), chosen.tokens, chosen.step_ms)
        slots = Slots.of(weighed.survival[:, :draft_len], limits.lens)
        return Plan(*slots.grant(self._times, load, draft_len, chosen.tokens_per_ms))

    def _alike(
        self, load: Load, limits: RowLimits, lens: Sequence[int], mix: Mix, survival: _Floats
    ) -> tuple[_Floats, _Floats]:
        """If all rows draft alike: expected tokens [draft lengths], and milliseconds of the step
        that is about to run and of each kind in the mix."""
        rows, longest, lengths = len(load.rows), lens[-1], self._lengths[: len(lens)]
        share = None
        if limits.shortest >= longest:
            drafted = rows * lengths
        else:
            able = limits.lens[:, None] >= _PLACES[: survival.shape[1]]
            drafted = _running(able)[lengths].astype(np.int64)
            survival = survival * able
            share = (drafted / np.maximum(rows * lengths, 1))[:, None]
        tokens = rows + _running(survival)[lengths]
        in_pass = drafted[:, None] + [load.plain_tokens, *(rows + chunk for chunk in mix.tokens)]
        places = self._places[: len(lens)]
        return tokens, self._times.ms(places, in_pass, load.kv_tokens, share)

    def _allot(
        self,
        load: Load,
        limits: RowLimits,
        lens: Sequence[int],
        mix: Mix,
        survival: _Floats,
        alike: _Floats,
    ) -> None:
        """Find out what allotting drafts gains. alike: tokens and milliseconds without."""
        self._allotted = 0
        self._allotted_for = alike[0] / len(load.rows)
        slots, chunks = Slots.of(survival, limits.lens), np.array(mix.tokens)
        rates = alike[0] / alike[1]
        for _ in range(_ROUNDS):
            best = Allotment.best(slots, self._times, load, lens, chunks, rates)
            values = np.stack([best.tokens @ mix.shares, best.times_ms @ mix.shares])
            rates = values[0] / values[1]
        self._gains = values / alike

    def _has_moved(self, tokens: _Floats) -> bool:
        """tokens: that a row is expected to emit, by draft length."""
        before = self._allotted_for
        return before.shape != tokens.shape or bool((abs(tokens - before) > _MOVED * before).any())

    def _worth(self, place: int) -> bool:
        """Whether this draft length gains by allotting drafts."""
        return bool(self._gains[0, place] > _WORTH * self._gains[1, place])


def _running(values: npt.NDArray[np.generic]) -> _Floats:
    """[places + 1]: sums over all rows of the first so many places, of [rows, places]."""
    found = np.zeros(values.shape[1] + 1)
    values.sum(axis=0).cumsum(out=found[1:])
    return found
