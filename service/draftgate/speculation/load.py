"""What the gate is told of a step: before it what is to run, after it what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Load", "Outcome", "RowLoad"]


@dataclass(frozen=True)
class RowLoad:
    """A row that decodes in the step and could speculate."""

    row_id: int
    """Names the row as long as it lives."""
    left: int
    """Most tokens that it may draft: one less than it may still emit."""
    cap: int | None = None
    """The request's own limit on drafted tokens; None: it has none."""


@dataclass(frozen=True)
class Load:
    """The step that is about to run."""

    rows: Sequence[RowLoad]
    """The rows that decode."""
    prefill_tokens: int = 0
    """Prompt tokens computed in the same pass."""
    kv_tokens: int = 0
    """Positions that attention reads, over all rows."""

    @property
    def plain_tokens(self) -> int:
        """Tokens in the pass when nothing is drafted."""
        return len(self.rows) + self.prefill_tokens


@dataclass(frozen=True)
class Outcome:
    """What became of one row's draft."""

    row_id: int
    source: int
    """Who drafted: a `contract.DraftSource`."""
    drafted: int
    """How many tokens were verified, or for a shadow guessed; 0: nothing was drafted."""
    accepted: Sequence[int] = ()
    """Which of them the target accepted, by their place in the draft: 0, 1, 2, ... of a chain, the
    places along one branch of a tree. Of a tree the tokens are in order of likelihood."""
    valid: int | None = None
    """How many of the drafted tokens, from the first on, say something about acceptance: those
    behind an end of the row, or ruled out by a grammar, do not. None: all."""
    shadow: bool = False
    """Whether nothing was verified: the drafted token was compared with the one emitted. It tells
    of that source's acceptance, not of how often the row would have drafted from it."""
