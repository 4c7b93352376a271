"""What became of a step, in numbers: what a recording holds and a replay reads again.

Load, choice, acceptance and times, and nothing of what was said: no text and no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

from draftgate.contract import GateReason
from draftgate.speculation.gate import Decision
from draftgate.speculation.load import Load, Outcome

__all__ = ["STEPS_FORMAT", "StepRecord"]

STEPS_FORMAT = "draftgate-steps/1"
"""What the first line of a recording says it is."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step that ran."""

    step: int
    """1, 2, 3, ... since the engine's start."""
    time_s: float
    """When it began, since the engine's start."""
    rows: int
    """Rows that decoded."""
    prefill_tokens: int
    """Prompt tokens computed in the same pass."""
    kv_tokens: int
    """Positions that attention read, over the rows that decoded."""
    draft_len: int
    """K of the batch."""
    reason: GateReason
    """Why."""
    drafted: int
    """Tokens verified, over all rows."""
    accepted: int
    """How many of them stood and were emitted."""
    outcomes: tuple[tuple[int, int, int], ...]
    """For each row that drafted: who did (a `contract.DraftSource`), drafted, accepted."""
    emitted: int
    """Tokens emitted, over all rows, those that a prompt's end brought among them."""
    expected_ms: float | None
    """What the gate expected it to take; None: it knew no costs, or was not asked."""
    measured_ms: float
    """What it took, from drafting to the last token."""

    @classmethod
    def of(
        cls,
        decision: Decision | None,
        outcomes: Sequence[Outcome],
        load: Load,
        *,
        step: int,
        time_s: float,
        emitted: int,
        measured_ms: float,
    ) -> Self:
        """decision: None without a drafter. load: what ran."""
        told = tuple(
            _outcome(o.source, o.drafted, len(o.accepted)) for o in outcomes if not o.shadow
        )
        return cls(
            step=step,
            time_s=time_s,
            rows=len(load.rows),
            prefill_tokens=load.prefill_tokens,
            kv_tokens=load.kv_tokens,
            draft_len=decision.draft_len if decision else 0,
            reason=decision.reason if decision else GateReason.DISABLED,
            drafted=sum(drafted for _, drafted, _ in told),
            accepted=sum(accepted for _, _, accepted in told),
            outcomes=told,
            emitted=emitted,
            expected_ms=(decision.expected_ms or None) if decision else None,
            measured_ms=measured_ms,
        )

    def to_mapping(self) -> dict[str, object]:
        """The fields, fit for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@cache
def _outcome(source: int, drafted: int, accepted: int) -> tuple[int, int, int]:
    """One object for all that are alike, of which there are few: thousands of steps are kept."""
    return source, drafted, accepted
