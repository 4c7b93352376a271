"""The gate: how many tokens to draft in the step that is about to run.

It takes the draft length K with the most expected tokens a second, E(K) / c(K): E from what was
accepted lately, c from a measured table put right by the steps that ran (DSpark, algorithm 1, and
SmartSpec, arXiv 2406.14066, section 4, are laws of this kind). What it looks at is the load and the
past, never a token drawn for this step, so it cannot bias what is sampled.

Pure arithmetic: no clock, no input or output, no tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from draftgate.contract import GateReason
from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.correction import CostCorrection
from draftgate.speculation.costs import CostTable
from draftgate.speculation.load import Load, Outcome
from draftgate.speculation.policy import Mode, Policy

__all__ = ["Candidate", "Decision", "Gate", "GateSettings"]


_HIGH_ACCEPTANCE = 0.8
"""What a good drafter reaches: where drafts would pay with it, too few are accepted, else the batch
fills the machine."""


@dataclass(frozen=True)
class GateSettings:
    """The law's constants."""

    switch_gain: float = 0.03
    """Another draft length must promise so much more before it is taken ..."""
    dwell_steps: int = 8
    """... and the present one have lasted so many steps ..."""
    urgent_share: float = 0.85
    """... unless it promises less than this share of a shorter one: that is taken at once."""
    probe_loss: float = 0.003
    """While nothing is drafted, share of the time that may be spent on finding out whether it would
    pay again."""
    probe_every_steps: int = 16
    """No more often than this."""
    probe_share: float = 0.125
    """Share of the rows that draft in a probe, at least one."""


@dataclass(frozen=True)
class Candidate:
    """A draft length and what it promises."""

    draft_len: int
    tokens: float
    """Expected from all rows together."""
    step_ms: float
    """Expected of the step."""

    @property
    def tokens_per_ms(self) -> float:
        """What the choice is by."""
        return self.tokens / self.step_ms


@dataclass(frozen=True)
class Decision:
    """What to draft in one step."""

    draft_len: int
    """K of the batch."""
    reason: GateReason
    """What decided it."""
    row_lens: tuple[int, ...]
    """Drafted tokens of each row of the load, at most K."""
    row_reasons: tuple[GateReason, ...]
    """What decided each: `reason`, or a limit of the row's own."""
    tokens_in_pass: int
    """With all those drafts."""
    expected_tokens: float
    """Emitted by the step."""
    expected_ms: float
    """Of the step; 0 without a cost table."""
    candidates: tuple[Candidate, ...] = ()
    """All that were weighed; empty where nothing was."""

    @property
    def speedup(self) -> float | None:
        """Expected tokens a second over those without drafts; None where that is not known."""
        plain = next((c for c in self.candidates if c.draft_len == 0), None)
        if plain is None or not self.expected_ms:
            return None
        return self.expected_tokens / self.expected_ms / plain.tokens_per_ms


class Gate:
    """Decides step by step. Not thread-safe; `decide` and `observe` take turns."""

    def __init__(
        self,
        draft_lens: Sequence[int],
        costs: CostTable | None,
        policy: Policy | None = None,
        settings: GateSettings | None = None,
    ) -> None:
        """draft_lens: what may be chosen, 0 is added. costs: without it `auto` takes the longest
        draft. policy: the configuration's, until an operator sets another.

        Raises DraftgateError(INVALID_ARGUMENT) where the policy is out of range.
        """
        self.costs = costs
        self.draft_lens = tuple(sorted({0, *draft_lens}))
        self.settings = settings or GateSettings()
        self.acceptance = AcceptanceEstimator(max(self.draft_lens[-1], 1))
        self.correction = CostCorrection()
        self.reasons: Counter[GateReason] = Counter()
        """Steps by what decided them."""
        self.switches = 0
        self.last: Decision | None = None
        """The latest decision."""
        self._policy = self._configured = self._asked = policy or Policy()
        self._policy.validate(self.draft_lens[-1])
        self._draft_len = 0
        self._since_switch = self.settings.dwell_steps
        self._since_probe = 0
        self._probe_from = 0

    @property
    def policy(self) -> Policy:
        return self._asked

    def set_policy(self, policy: Policy) -> None:
        """Obey another policy from the next step on.

        Raises DraftgateError(INVALID_ARGUMENT) where it is out of range.
        """
        policy.validate(self.draft_lens[-1])
        self._asked = policy

    def decide(self, load: Load) -> Decision:
        """What to draft in the step that is about to run. A load without rows drafts nothing."""
        # Taken once: it may be set while a step is decided.
        self._policy = self._asked
        decision = self._decide(load)
        self.reasons[decision.reason] += 1
        self.last = decision
        return decision

    def observe(
        self, decision: Decision, outcomes: Sequence[Outcome], load: Load, measured_ms: float | None
    ) -> None:
        """What came of a step: the drafts of its rows, and how long it took.

        load: what ran, which may be less than was decided on. measured_ms: None where the time says
        nothing about steps like it.
        """
        self.acceptance.observe(outcomes)
        if self.costs is None or measured_ms is None or not load.plain_tokens:
            return
        drafted = sum(outcome.drafted for outcome in outcomes if not outcome.shadow)
        tokens = load.plain_tokens + drafted
        draft_len = decision.draft_len if drafted else 0
        expected_ms = self.costs.step_ms(draft_len, tokens, load.kv_tokens)
        self.correction.observe(
            tokens, drafted=drafted > 0, expected_ms=expected_ms, measured_ms=measured_ms
        )

    def forget(self, row_id: int) -> None:
        """The row has left."""
        self.acceptance.forget(row_id)

    def _decide(self, load: Load) -> Decision:
        policy = self._policy
        highest = self.draft_lens[-1]
        if policy.max_draft_len is not None:
            highest = min(highest, policy.max_draft_len)
        limits = _limits(load, highest)
        if policy.mode is not Mode.AUTO or self.costs is None or not highest:
            return self._ordered(load, limits, highest)
        if not load.rows:
            return self._decision(load, limits, 0, GateReason.PREFILL, ())
        candidates = self._candidates(load, limits, highest)
        chosen, reason = self._choose(candidates)
        self._note(chosen.draft_len)
        if chosen.draft_len == 0 and len(candidates) > 1:
            probe = self._probe(load, limits, candidates)
            if probe is not None:
                return probe
        return self._decision(load, limits, chosen.draft_len, reason, candidates)

    def _ordered(self, load: Load, limits: _Limits, highest: int) -> Decision:
        """What an operator wants, or all there is where no costs are known."""
        mode, draft_len = self._policy.mode, highest
        if mode is Mode.OFF:
            draft_len = 0
        elif mode is Mode.FIXED:
            draft_len = min(self._policy.draft_len, highest)
        reason = GateReason.OPERATOR
        if self._policy is self._configured:
            reason = GateReason.FIXED if self.draft_lens[-1] else GateReason.DISABLED
        self._note(draft_len)
        candidates: tuple[Candidate, ...] = ()
        if self.costs is not None and load.rows:
            candidates = self._candidates(load, limits, highest)
        return self._decision(load, limits, draft_len, reason, candidates)

    def _candidates(self, load: Load, limits: _Limits, highest: int) -> tuple[Candidate, ...]:
        """Every draft length that may be chosen, the shortest first."""
        assert self.costs is not None
        known = self.costs.curves
        lens = [k for k in self.draft_lens if k <= highest and k in known]
        tokens = self._expected_tokens(load, limits).tolist()
        drafted = np.minimum.outer(lens, limits.lens).sum(axis=1).tolist()
        return tuple(
            Candidate(
                draft_len=draft_len,
                tokens=tokens[draft_len],
                step_ms=self._step_ms(draft_len, load.plain_tokens + more, load.kv_tokens),
            )
            for draft_len, more in zip(lens, drafted, strict=True)
        )

    def _expected_tokens(self, load: Load, limits: _Limits) -> npt.NDArray[np.float64]:
        """Of all rows together, [max_draft_len + 1] by draft length."""
        survival = self.acceptance.survival(limits.row_ids)
        places = np.arange(1, survival.shape[1] + 1)
        gained = np.where(places <= limits.lens[:, None], survival, 0.0).sum(axis=0)
        tokens: npt.NDArray[np.float64] = np.cumsum([len(load.rows), *gained])
        return tokens

    def _step_ms(self, draft_len: int, tokens: int, kv_tokens: int) -> float:
        assert self.costs is not None
        factor = self.correction.factor(tokens, drafted=draft_len > 0)
        return factor * self.costs.step_ms(draft_len, max(tokens, 1), kv_tokens)

    def _choose(self, candidates: Sequence[Candidate]) -> tuple[Candidate, GateReason]:
        allowed = self._within_ceiling(candidates)
        best = max(allowed, key=lambda c: (c.tokens_per_ms, -c.draft_len))
        freely = max(candidates, key=lambda c: (c.tokens_per_ms, -c.draft_len))
        reason = self._reason(best, candidates)
        if freely is not best:
            reason = GateReason.ITL_CEILING
        present = next((c for c in allowed if c.draft_len == self._draft_len), None)
        if present is None or present is best:
            return best, reason
        urgent = (
            best.draft_len < present.draft_len
            and present.tokens_per_ms < self.settings.urgent_share * best.tokens_per_ms
        )
        settled = (
            self._since_switch >= self.settings.dwell_steps
            and best.tokens_per_ms > (1 + self.settings.switch_gain) * present.tokens_per_ms
        )
        return (best, reason) if urgent or settled else (present, GateReason.DWELL)

    def _within_ceiling(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those within the operator's limits on time; the quickest step where none is."""
        ceiling, wish = self._policy.max_step_ms, self._policy.max_tpot_ms
        if ceiling is not None:
            quick = [c for c in candidates if c.step_ms <= ceiling]
            candidates = quick or [min(candidates, key=lambda c: c.step_ms)]
        if wish is not None:
            rows = candidates[0].tokens  # what is emitted without drafts: one a row
            within = [c for c in candidates if c.step_ms * rows / c.tokens <= wish]
            candidates = within or [max(candidates, key=lambda c: c.tokens_per_ms)]
        return candidates

    def _reason(self, best: Candidate, candidates: Sequence[Candidate]) -> GateReason:
        """Why the best is the best."""
        if best.draft_len:
            return GateReason.GAIN
        plain = candidates[0]
        for candidate in candidates[1:]:
            tokens = sum(_HIGH_ACCEPTANCE**place for place in range(candidate.draft_len + 1))
            if tokens * plain.step_ms > candidate.step_ms:
                return GateReason.LOW_ACCEPTANCE
        return GateReason.COMPUTE_BOUND

    def _note(self, draft_len: int) -> None:
        self._since_switch += 1
        if draft_len != self._draft_len:
            self.switches += 1
            self._since_switch = 0
            self._since_probe = 0
        self._draft_len = draft_len

    def _probe(
        self, load: Load, limits: _Limits, candidates: tuple[Candidate, ...]
    ) -> Decision | None:
        """Now and then a few rows draft one token, to see whether it would pay again."""
        self._since_probe += 1
        able = [place for place in range(len(load.rows)) if limits.lens[place]]
        if not able:
            return None
        count = max(1, round(self.settings.probe_share * len(able)))
        shortest = candidates[1].draft_len
        cost_ms = self._step_ms(shortest, load.plain_tokens + count, load.kv_tokens)
        loss = max(cost_ms / candidates[0].step_ms - 1, 0.0)
        every = max(self.settings.probe_every_steps, math.ceil(loss / self.settings.probe_loss))
        if self._since_probe < every:
            return None
        self._since_probe = 0
        chosen = {able[(self._probe_from + i) % len(able)] for i in range(count)}
        self._probe_from += count
        lens = np.array([int(place in chosen) for place in range(len(load.rows))])
        limits = replace(limits, lens=lens)
        decision = self._decision(load, limits, shortest, GateReason.PROBE, candidates)
        return replace(decision, row_reasons=(GateReason.PROBE,) * len(load.rows))

    def _decision(
        self,
        load: Load,
        limits: _Limits,
        draft_len: int,
        reason: GateReason,
        candidates: tuple[Candidate, ...],
    ) -> Decision:
        lens = np.minimum(limits.lens, draft_len)
        in_pass = load.plain_tokens + int(lens.sum())
        chosen = next((c for c in candidates if c.draft_len == draft_len), None)
        return Decision(
            draft_len=draft_len,
            reason=reason,
            row_lens=tuple(lens.tolist()),
            row_reasons=tuple(
                limit if limits.lens[place] < draft_len else reason
                for place, limit in enumerate(limits.reasons)
            ),
            tokens_in_pass=in_pass,
            expected_tokens=chosen.tokens if chosen else float(len(load.rows)),
            expected_ms=chosen.step_ms if chosen else 0.0,
            candidates=tuple(candidates),
        )


@dataclass(frozen=True)
class _Limits:
    """How many tokens each row may draft at most, and what says so."""

    row_ids: list[int]
    lens: npt.NDArray[np.int64]
    """[rows]"""
    reasons: list[GateReason]
    """Of a row that may draft less than the others."""


def _limits(load: Load, highest: int) -> _Limits:
    lens, reasons = [], []
    for row in load.rows:
        cap = highest if row.cap is None else min(row.cap, highest)
        lens.append(max(min(cap, row.left), 0))
        reasons.append(GateReason.BUDGET if row.left < cap else GateReason.REQUEST_CAP)
    return _Limits([row.row_id for row in load.rows], np.array(lens, dtype=np.int64), reasons)
