"""Which of the draft lengths that were weighed to take, and why."""

from __future__ import annotations

from collections.abc import Sequence

from draftgate.contract import GateReason
from draftgate.speculation.policy import Policy
from draftgate.speculation.settings import GateSettings
from draftgate.speculation.weighing import Candidate

__all__ = ["Chooser"]

_HIGH_ACCEPTANCE = 0.8
"""What a good drafter reaches: where drafts would pay with it, too few are accepted, else the batch
fills the machine."""


class Chooser:
    """Keeps a draft length until another one is better by enough."""

    def __init__(self, settings: GateSettings) -> None:
        self._settings = settings
        self._since_switch = settings.dwell_steps
        self.draft_len = 0
        """What is kept."""
        self.switches = 0
        self._free = True
        self._rival: int | None = None
        """What would be taken if it promised more than this little, or goes on to do so."""
        self._rival_steps = 0

    def restart(self) -> None:
        """The next choice is free of what was kept: it was not chosen under the present policy."""
        self._free = True

    def choose(
        self,
        candidates: Sequence[Candidate],
        policy: Policy,
        usual_overrun: float = 1.0,
        overrun: float = 1.0,
    ) -> tuple[Candidate, GateReason]:
        """What to draft in the step that is about to run.

        candidates: the shortest first. usual_overrun, overrun: how far steps run over what is
        expected of them, usually and one like this; a ceiling leaves room for that.
        """
        allowed, ceiling_ms = candidates, policy.max_step_ms
        if policy.max_tpot_ms is not None:
            allowed = _within_wish(allowed, policy.max_tpot_ms)
        if ceiling_ms is not None:
            allowed = _within_ceiling(
                allowed, [c.mean_ms * usual_overrun for c in allowed], ceiling_ms
            )
        kept, reason = self._keep(allowed, candidates)
        self.keep(kept.draft_len)
        if ceiling_ms is None:
            return kept, reason
        # This very step may be longer than usual, by a prompt chunk say. What is kept stays: the
        # next step may not be.
        allowed = _within_ceiling(allowed, [c.step_ms * overrun for c in allowed], ceiling_ms)
        if kept not in allowed:
            return _best(allowed), GateReason.ITL_CEILING
        return kept, reason

    def keep(self, draft_len: int) -> None:
        """Keep this one from now on, whoever chose it."""
        self._since_switch += 1
        self._rival_steps += 1
        if draft_len != self.draft_len:
            self.draft_len = draft_len
            self.switches += 1
            self._since_switch = 0

    @property
    def _wanted_gain(self) -> float:
        """How much more another draft length has to promise: the less the longer one is kept, so
        that in the end the best is."""
        settings = self._settings
        less = min(settings.gain_steps / max(self._since_switch, 1), 1.0)
        return max(settings.switch_gain * less, settings.least_gain)

    def _keep(
        self, allowed: Sequence[Candidate], candidates: Sequence[Candidate]
    ) -> tuple[Candidate, GateReason]:
        settings, best = self._settings, _best(allowed)
        reason = _reason(best, candidates)
        if allowed is not candidates and _best(candidates) is not best:
            reason = GateReason.ITL_CEILING
        present = next((c for c in allowed if c.draft_len == self.draft_len), None)
        if self._free or present is None or present is best:
            self._free = False
            return best, reason
        urgent = (
            best.draft_len < present.draft_len
            and present.tokens_per_ms < settings.urgent_share * best.tokens_per_ms
        )
        settled = self._since_switch >= settings.dwell_steps and self._gains(best, present)
        return (best, reason) if urgent or settled else (present, GateReason.DWELL)

    def _gains(self, best: Candidate, present: Candidate) -> bool:
        """Whether the best promises enough more: much, or a little that lasts."""
        gain = best.tokens_per_ms / present.tokens_per_ms - 1
        wanted = best.draft_len if gain > self._wanted_gain else None
        if wanted != self._rival:
            self._rival, self._rival_steps = wanted, 0
        lasting = self._rival_steps >= self._settings.lasting_steps
        return wanted is not None and (gain > self._settings.switch_gain or lasting)


def _best(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda c: (c.tokens_per_ms, -c.draft_len))


def _within_ceiling(
    candidates: Sequence[Candidate], times_ms: Sequence[float], ceiling_ms: float
) -> Sequence[Candidate]:
    """Those whose time is within the ceiling; the quickest where none is."""
    quickest = min(times_ms)
    return [
        candidate
        for candidate, time_ms in zip(candidates, times_ms, strict=True)
        if time_ms <= max(ceiling_ms, quickest)
    ]


def _within_wish(candidates: Sequence[Candidate], max_tpot_ms: float) -> Sequence[Candidate]:
    """Those that give every row a token in this time, on average; the best where none does."""
    rows = candidates[0].mean_tokens  # what is emitted without drafts: one a row
    within = [c for c in candidates if c.mean_ms * rows / c.mean_tokens <= max_tpot_ms]
    return within or [_best(candidates)]


def _reason(best: Candidate, candidates: Sequence[Candidate]) -> GateReason:
    """Why the best is the best."""
    if best.draft_len:
        return GateReason.GAIN
    plain = candidates[0]
    for candidate in candidates[1:]:
        tokens = sum(_HIGH_ACCEPTANCE**place for place in range(candidate.draft_len + 1))
        if tokens * plain.step_ms > candidate.step_ms:
            return GateReason.LOW_ACCEPTANCE
    return GateReason.COMPUTE_BOUND
