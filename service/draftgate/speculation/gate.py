"""The gate: how many tokens to draft in the step that is about to run.

It takes the draft length K with the most expected tokens a second, E(K) / c(K): E from what was
accepted lately, c from a measured table put right by the steps that ran (DSpark, algorithm 1, and
SmartSpec, arXiv 2406.14066, section 4, are laws of this kind). What it looks at is the load and the
past, never a token drawn for this step, so it cannot bias what is sampled.

Pure arithmetic: no clock, no input or output, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftgate.contract import GateReason
from draftgate.speculation.acceptance import AcceptanceEstimator
from draftgate.speculation.choice import Chooser
from draftgate.speculation.correction import CostCorrection
from draftgate.speculation.costs import CostTable, drafted_share
from draftgate.speculation.limits import RowLimits
from draftgate.speculation.load import Load, Outcome
from draftgate.speculation.overrun import Overrun
from draftgate.speculation.pass_times import PassTimes
from draftgate.speculation.policy import Mode, Policy
from draftgate.speculation.probing import Prober
from draftgate.speculation.settings import GateSettings
from draftgate.speculation.weighing import Candidate, Plan, Weighed, Weigher

__all__ = ["Decision", "Gate"]


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
        return self.expected_tokens / self.expected_ms * plain.step_ms / plain.tokens


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
        self.last: Decision | None = None
        """The latest decision."""
        self._policy = self._configured = self._asked = policy or Policy()
        self._policy.validate(self.draft_lens[-1])
        self._times: PassTimes | None = None
        self._weigher: Weigher | None = None
        if costs is not None:
            self._times = PassTimes(costs, self.correction)
            self._weigher = Weigher(self._times, self.acceptance, self.draft_lens, self.settings)
        self._overruns = {False: Overrun(), True: Overrun()}
        """Of steps without and with prompt tokens."""
        self._chooser = Chooser(self.settings)
        self._prober = Prober(self.settings)
        self._held: tuple[Policy, RowLimits] | None = None
        """What the latest decision is good for while nothing changes; None: for its step alone."""
        self._held_steps = 0

    @property
    def policy(self) -> Policy:
        return self._asked

    @property
    def switches(self) -> int:
        """How often another draft length was taken; probes apart, and steps held to a ceiling."""
        return self._chooser.switches

    def set_policy(self, policy: Policy) -> None:
        """Obey another policy from the next step on.

        Raises DraftgateError(INVALID_ARGUMENT) where it is out of range.
        """
        policy.validate(self.draft_lens[-1])
        self._asked = policy

    def decide(self, load: Load) -> Decision:
        """What to draft in the step that is about to run. A load without rows drafts nothing."""
        # Taken once: it may be set while a step is decided.
        if self._policy is not self._asked:
            self._policy = self._asked
            self._chooser.restart()
        decision = self._decide(load)
        self.reasons[decision.reason] += 1
        self.last = decision
        return decision

    def observe(
        self, decision: Decision, outcomes: Sequence[Outcome], load: Load, measured_ms: float | None
    ) -> None:
        """What came of a step: the drafts of its rows, and how long it took.

        load: what ran, which may be less than was decided on. measured_ms: None where no clock ran.
        """
        self.acceptance.observe(outcomes)
        if self._times is None or measured_ms is None or not load.plain_tokens:
            return
        decided_tokens = decision.tokens_in_pass - sum(decision.row_lens)
        if decision.expected_ms and load.plain_tokens <= decided_tokens:
            self._overruns[load.prefill_tokens > 0].observe(decision.expected_ms, measured_ms)
        if load.prefill_tokens:
            return  # They cost more or less than drafts, by what comes before them.
        drafted = sum(outcome.drafted for outcome in outcomes if not outcome.shadow)
        draft_len = decision.draft_len if drafted else 0
        self._times.observe(
            draft_len,
            load.plain_tokens + drafted,
            load.kv_tokens,
            drafted_share(drafted, draft_len, len(load.rows)),
            measured_ms,
        )

    def forget(self, row_id: int) -> None:
        """The row has left."""
        self.acceptance.forget(row_id)

    def _decide(self, load: Load) -> Decision:
        policy = self._policy
        highest = self.draft_lens[-1]
        if policy.max_draft_len is not None:
            highest = min(highest, policy.max_draft_len)
        limits = RowLimits.of(load, highest)
        if self._holds(policy, limits):
            assert self.last is not None
            assert self._weigher is not None
            self._chooser.keep(self.last.draft_len)
            self._weigher.pass_by(load)
            return self.last
        self._held = None
        if policy.mode is not Mode.AUTO or self._weigher is None or not highest:
            return self._ordered(load, limits, highest)
        if not load.rows:
            return self._decision(
                load, Plan(limits.lens, 0.0, 0.0), limits, 0, GateReason.PREFILL, None
            )
        weighed = self._weigher.weigh(load, limits, highest)
        usual, present = self._overruns[False], self._overruns[load.prefill_tokens > 0]
        chosen, reason = self._chooser.choose(
            weighed.candidates, policy, usual.factor, present.factor
        )
        if weighed.load_changed:
            self._prober.restart()
        plan = self._weigher.plan(load, limits, weighed, chosen)
        if plan.lens.any():
            self._prober.restart()
            if policy.max_step_ms is None:
                self._held, self._held_steps = (policy, limits), 0
        elif len(weighed.candidates) > 1:
            probe = self._probe(load, limits, weighed)
            if probe is not None:
                return probe
        return self._decision(load, plan, limits, chosen.draft_len, reason, weighed)

    def _holds(self, policy: Policy, limits: RowLimits) -> bool:
        """Whether the latest decision is recent enough, and the load like its own: what is known
        changes slowly, and weighing takes time."""
        self._held_steps += 1
        if self._held is None or self._held_steps >= self.settings.hold_steps:
            return False
        asked, before = self._held
        return policy is asked and limits.alike(before)

    def _ordered(self, load: Load, limits: RowLimits, highest: int) -> Decision:
        """What an operator wants, or all there is where no costs are known."""
        mode, draft_len = self._policy.mode, highest
        if mode is Mode.OFF:
            draft_len = 0
        elif mode is Mode.FIXED:
            draft_len = min(self._policy.draft_len, highest)
        reason = GateReason.OPERATOR
        if self._policy is self._configured:
            reason = GateReason.FIXED if self.draft_lens[-1] else GateReason.DISABLED
        self._chooser.keep(draft_len)
        plan = Plan(np.minimum(limits.lens, draft_len), float(len(load.rows)), 0.0)
        weighed = None
        if self._weigher is not None and load.rows:
            weighed = self._weigher.weigh(load, limits, highest)
            for each in weighed.candidates:
                if each.draft_len == draft_len:
                    plan = Plan(plan.lens, each.tokens, each.step_ms)
        return self._decision(load, plan, limits, draft_len, reason, weighed)

    def _probe(self, load: Load, limits: RowLimits, weighed: Weighed) -> Decision | None:
        """Now and then a few rows draft one token."""
        assert self._times is not None
        plain, shortest = weighed.candidates[0], weighed.candidates[1].draft_len
        times, rows = self._times, len(load.rows)

        def step_ms(count: int) -> float:
            share = drafted_share(count, shortest, rows)
            return times.step_ms(shortest, load.plain_tokens + count, load.kv_tokens, share)

        promise = max(c.tokens_per_ms for c in weighed.candidates[1:]) / plain.tokens_per_ms
        able = np.flatnonzero(limits.lens)
        chosen = self._prober.rows(
            able, load.prefill_tokens, promise, lambda count: step_ms(count) / plain.step_ms - 1
        )
        if not len(chosen):
            return None
        lens = np.zeros(rows, dtype=np.int64)
        lens[chosen] = 1
        tokens = rows + float(weighed.survival[chosen, 0].sum())
        plan = Plan(lens, tokens, step_ms(len(chosen)))
        return self._decision(load, plan, limits, shortest, GateReason.PROBE, weighed)

    def _decision(
        self,
        load: Load,
        plan: Plan,
        limits: RowLimits,
        draft_len: int,
        reason: GateReason,
        weighed: Weighed | None,
    ) -> Decision:
        row_lens = tuple(plan.lens.tolist())
        return Decision(
            draft_len=draft_len,
            reason=reason,
            row_lens=row_lens,
            row_reasons=_row_reasons(row_lens, limits, draft_len, reason),
            tokens_in_pass=load.plain_tokens + sum(row_lens),
            expected_tokens=plan.tokens,
            expected_ms=plan.step_ms,
            candidates=weighed.candidates if weighed else (),
        )


def _row_reasons(
    lens: tuple[int, ...], limits: RowLimits, draft_len: int, reason: GateReason
) -> tuple[GateReason, ...]:
    if reason is GateReason.PROBE or min(lens, default=draft_len) == draft_len:
        return (reason,) * len(lens)
    reasons: list[GateReason] = []
    for place, (drafted, most) in enumerate(zip(lens, limits.lens.tolist(), strict=True)):
        if drafted == draft_len:
            reasons.append(reason)
        elif drafted == most:
            reasons.append(limits.reason(place))
        else:
            reasons.append(GateReason.LOW_ACCEPTANCE)
    return tuple(reasons)
