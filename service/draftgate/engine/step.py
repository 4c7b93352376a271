"""One engine step: draft, one target pass over all rows, verify, hand out the tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace

import torch

from draftgate.contract import FinishReason, GateReason
from draftgate.engine import told
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft, Drafter, Settled
from draftgate.engine.kv_cache import KVCache
from draftgate.engine.model import Pass, Target
from draftgate.engine.request import Output, VerifyStep
from draftgate.engine.sampler import most_likely, top_logprobs
from draftgate.engine.scheduler import ScheduledRow
from draftgate.engine.sequence import Sequence
from draftgate.engine.step_log import StepLog
from draftgate.engine.tree import chain_parents, depths
from draftgate.engine.verify import verify_equal, verify_rejection
from draftgate.errors import DraftgateError
from draftgate.speculation import Decision, Gate, Load, Outcome, RowLoad, StepRecord

__all__ = ["StepTotals", "Stepper"]

_OWN_LIMITS = (GateReason.REQUEST_CAP, GateReason.BUDGET)
"""Rows that draft nothing for these are not asked what they would have drafted."""

_SHADOW_EVERY = 4
"""The others are in one step of so many: what it takes to ask, and to learn from, is a part of what
a gate costs that never drafts."""


@dataclass
class StepTotals:
    """Totals over all steps."""

    steps: int = 0
    emitted_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Stepper:
    """Runs steps on the rows that the scheduler picked."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        drafter: Drafter | None,
        gate: Gate,
        max_sequence_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._cache = cache
        self.drafter = drafter
        """Drafts; None: nobody does."""
        self.gate = gate
        """Decides how much each step drafts."""
        self._max_sequence_tokens = max_sequence_tokens
        self._clock = clock
        self._begun_s = 0.0
        self._decision: Decision | None = None
        self._granted: dict[int, tuple[int, GateReason]] = {}
        self._shadows: dict[int, Draft] = {}
        self.start_over()

    def start_over(self) -> None:
        """Count from now on, as if no step had run."""
        self.totals = StepTotals()
        self.log = StepLog()
        self._started_s = self._clock()

    @property
    def uptime_s(self) -> float:
        """Since when it counts."""
        return self._clock() - self._started_s

    def draft(self, running: ListOf[Sequence], prefill_tokens: int) -> dict[int, Draft]:
        """Drafts by row id for the rows that decode and that the gate lets speculate: an empty one
        where the cache has no room, none where nothing was proposed.

        prefill_tokens: how many tokens of prompts the step is going to compute.
        """
        self._begun_s = self._clock()
        self._decision, self._granted, self._shadows = None, {}, {}
        if self.drafter is None:
            return {}
        decoding = [sequence for sequence in running if sequence.decoding]
        self._decide(decoding, prefill_tokens)
        queries, idle, drafts = [], [], {}
        for sequence in decoding:
            count, reason = self._granted[sequence.row_id]
            if not count:
                if reason not in _OWN_LIMITS:
                    idle.append(told.query(sequence, 1))
                continue
            assert sequence.slot is not None
            # A drafter with a cache of its own writes where the target will, before it does.
            room = self.drafter.places(count)
            if not self._cache.grow(sequence.slot, len(sequence.tokens) + room):
                drafts[sequence.row_id] = Draft()
                continue
            queries.append(told.query(sequence, count))
        for query, draft in zip(queries, self.drafter.propose(queries), strict=True):
            if draft.token_ids:
                drafts[query.row_id] = draft
        if self.totals.steps % _SHADOW_EVERY == 0:
            for query, draft in zip(idle, self.drafter.shadow(idle), strict=True):
                if draft.token_ids:
                    self._shadows[query.row_id] = draft
        return drafts

    def run(
        self, rows: ListOf[ScheduledRow], drafts: dict[int, Draft]
    ) -> list[tuple[Sequence, Output]]:
        """One pass over these rows. Returns what to send for the rows that emitted."""
        self.totals.steps += 1
        emitted_before = self.totals.emitted_tokens
        ran = self._load(
            [row.sequence for row in rows if row.sequence.decoding],
            sum(row.count for row in rows if not row.sequence.decoding),
        )
        for row in rows:
            if row.sequence.computed == 0:
                # New, or put back a while ago and now computed again from its start.
                self.forget(row.sequence)
        granted = [drafts[row.sequence.row_id] if row.draft_len else Draft() for row in rows]
        done = self._forward(rows, granted)
        greedy = self._greedy(rows, done.logits)
        outputs: list[tuple[Sequence, Output]] = []
        settled: list[Settled] = []
        outcomes: list[Outcome] = []
        packed = first = 0
        for row, draft in zip(rows, granted, strict=True):
            sequence, start = row.sequence, row.sequence.computed
            prefilling = not sequence.decoding
            sequence.computed += row.count
            places = [*range(packed, packed + row.count)]
            if sequence.decoding:
                last = first + len(draft.token_ids) + 1
                logits = done.logits[first:last]
                standing, token = self._verify(sequence, draft, logits, greedy[first:last])
                proposed = sequence.row_id in drafts
                reason = self._reason(sequence, draft, proposed)
                reason = GateReason.PREFILL if prefilling else reason
                output = self._emit(sequence, draft, standing, token, logits, reason)
                outputs.append((sequence, replace(output, batch_rows=len(rows))))
                if draft.token_ids:
                    outcomes.append(told.outcome(sequence, draft, standing, output))
                elif sequence.row_id in self._shadows:
                    outcomes.append(told.guessed(sequence, self._shadows[sequence.row_id], output))
                places += [packed + row.count + place for place in standing]
                first = last
            settled.append(told.settled(sequence, draft, start, places))
            packed += row.count + len(draft.token_ids)
        if self.drafter is not None:
            self.drafter.observe(settled, done.features)
        took_ms = 1e3 * (self._clock() - self._begun_s)
        if self._decision is not None:
            self.gate.observe(self._decision, outcomes, ran, took_ms if took_ms > 0 else None)
        self.log.add(
            StepRecord.of(
                self._decision,
                outcomes,
                ran,
                step=self.totals.steps,
                time_s=self._begun_s - self._started_s,
                emitted=self.totals.emitted_tokens - emitted_before,
                measured_ms=took_ms,
            )
        )
        return outputs

    def send_last(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: DraftgateError | None = None,
    ) -> None:
        """End a generation between steps: an output without tokens."""
        sequence.sink(
            Output(
                request_id=sequence.request.request_id,
                chunk_index=sequence.chunks,
                finish_reason=reason,
                error=error,
                prompt_len=sequence.prompt_len,
            )
        )
        sequence.chunks += 1

    def forget(self, sequence: Sequence) -> None:
        """The generation has left, or is computed again from its start."""
        if self.drafter is not None:
            self.drafter.reset(sequence.row_id)
        self.gate.forget(sequence.row_id)

    def _decide(self, decoding: ListOf[Sequence], prefill_tokens: int) -> None:
        """Ask the gate how many tokens each of these rows may draft."""
        decision = self._decision = self.gate.decide(self._load(decoding, prefill_tokens))
        self._granted = {
            sequence.row_id: (count, reason)
            for sequence, count, reason in zip(
                decoding, decision.row_lens, decision.row_reasons, strict=True
            )
        }

    def _load(self, decoding: ListOf[Sequence], prefill_tokens: int) -> Load:
        return Load(
            rows=[
                RowLoad(
                    row_id=sequence.row_id,
                    # The pass emits one token of its own, so a draft of all that is left is never
                    # needed.
                    left=min(sequence.budget, self._max_sequence_tokens - len(sequence.tokens)) - 1,
                    cap=sequence.request.params.max_draft_len,
                )
                for sequence in decoding
            ],
            prefill_tokens=prefill_tokens,
            kv_tokens=sum(sequence.computed for sequence in decoding),
        )

    def _forward(self, rows: ListOf[ScheduledRow], drafts: ListOf[Draft]) -> Pass:
        """The target's pass; its logits are those of the rows that emit: after their last token
        and after each of their drafts."""
        spans: list[RowSpan] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        for row, draft in zip(rows, drafts, strict=True):
            sequence = row.sequence
            assert sequence.slot is not None
            upto = sequence.computed + row.count
            count = row.count + len(draft.token_ids)
            spans.append(RowSpan(sequence.slot, sequence.computed, count, draft.tree))
            token_ids.extend(sequence.tokens[sequence.computed : upto])
            if upto >= sequence.prefill_upto:
                wanted.extend(range(len(token_ids) - 1, len(token_ids) + len(draft.token_ids)))
            token_ids.extend(draft.token_ids)
        device = self._target.device
        return self._target.forward(
            torch.tensor(token_ids, device=device),
            spans,
            self._cache.stores[0],
            torch.tensor(wanted, dtype=torch.long, device=device),
            self.drafter.taps if self.drafter is not None else (),
        )

    def _greedy(self, rows: ListOf[ScheduledRow], logits: torch.Tensor) -> list[int]:
        """The most likely token at each position, in one go; needed by plain greedy rows only."""
        plain = any(_plain_greedy(row.sequence) for row in rows)
        return most_likely(logits) if plain and len(logits) else [0] * len(logits)

    def _verify(
        self, sequence: Sequence, draft: Draft, logits: torch.Tensor, greedy: ListOf[int]
    ) -> tuple[ListOf[int], int]:
        """The places of the drafts that stand, in order, and the token after them."""
        sampler, ids, parents = sequence.sampler, draft.token_ids, draft.parents
        if _plain_greedy(sequence):
            return verify_equal(greedy, ids, parents)
        if sampler.params.greedy:
            chosen = most_likely(sampler.penalised(logits.float(), ids, parents))
            return verify_equal(chosen, ids, parents)
        probabilities = sampler.probabilities(logits.float(), ids, parents)
        if sampler.params.coupled:
            first = len(sequence.tokens)
            positions = [first, *(first + depth for depth in depths(parents))]
            return verify_equal(sampler.coupled(probabilities, positions), ids, parents)
        assert parents == chain_parents(len(ids))
        accepted, token = verify_rejection(
            probabilities, ids, draft.probabilities, sampler.generator, draft.vocabulary
        )
        return range(accepted), token

    def _emit(
        self,
        sequence: Sequence,
        draft: Draft,
        standing: ListOf[int],
        token: int,
        logits: torch.Tensor,
        gate_reason: GateReason,
    ) -> Output:
        """Append the step's tokens and say what to send. standing: the places of the drafts that
        stand."""
        drafted = (draft.token_ids[place] for place in standing)
        tokens, reason = self._cut(sequence, (*drafted, token))
        standing = standing[: len(tokens)]
        accepted = len(standing)
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock()
        # Keys and values of rejected drafts stay in the cache and are overwritten.
        assert sequence.slot is not None
        first = sequence.computed
        store = self._cache.stores[0]
        store.pick(sequence.slot, first, [first + place for place in standing])
        sequence.computed += accepted
        sequence.tokens.extend(tokens)
        sequence.prefill_upto = len(sequence.tokens) - 1
        sequence.sampler.observe(tokens)
        self._count(draft, accepted, len(tokens))
        output = self._output(sequence, draft, standing, tokens, logits, gate_reason, reason)
        sequence.chunks += 1
        return output

    def _cut(
        self, sequence: Sequence, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason]:
        """The tokens up to the one that ends the generation, and why it ends."""
        room = min(sequence.budget, self._max_sequence_tokens - len(sequence.tokens))
        for index, token in enumerate(tokens):
            reason = sequence.ended_by(token, self._target.config.eos_token_ids)
            if reason is not FinishReason.NONE:
                return tokens[: index + 1], reason
            if index + 1 == room:
                return tokens[: index + 1], FinishReason.LENGTH
        return tokens, FinishReason.NONE

    def _reason(self, sequence: Sequence, draft: Draft, proposed: bool) -> GateReason:
        count, reason = self._granted.get(sequence.row_id, (0, GateReason.DISABLED))
        if not count or draft.token_ids:
            return reason
        return GateReason.BUDGET if proposed else GateReason.NO_DRAFT

    def _count(self, draft: Draft, accepted: int, emitted: int) -> None:
        self.totals.emitted_tokens += emitted
        if draft.token_ids:
            self.totals.verify_steps += 1
            self.totals.drafted_tokens += len(draft.token_ids)
            self.totals.accepted_tokens += accepted

    def _output(
        self,
        sequence: Sequence,
        draft: Draft,
        standing: ListOf[int],
        tokens: tuple[int, ...],
        logits: torch.Tensor,
        gate_reason: GateReason,
        reason: FinishReason,
    ) -> Output:
        assert sequence.started_s is not None
        assert sequence.first_token_s is not None
        asked, step = sequence.request.params.logprobs, None
        if draft.token_ids:
            step = VerifyStep(told.accepted_first(draft, standing), len(standing), draft.source)
        if asked is not None and draft.tree:
            logits = logits[[0, *(place + 1 for place in standing)]]
        logprobs, top_ids, top_values = top_logprobs(asked, tokens, logits)
        return Output(
            request_id=sequence.request.request_id,
            chunk_index=sequence.chunks,
            token_ids=tokens,
            logprobs=logprobs,
            top_ids=top_ids,
            top_logprobs=top_values,
            verify_step=step,
            gate_reason=gate_reason,
            finish_reason=reason,
            prompt_len=sequence.prompt_len,
            queue_us=round((sequence.started_s - sequence.arrived_s) * 1e6),
            prefill_us=round((sequence.first_token_s - sequence.started_s) * 1e6),
        )


def _plain_greedy(sequence: Sequence) -> bool:
    params = sequence.request.params
    return params.greedy and not params.has_penalties
