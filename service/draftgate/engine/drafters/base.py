"""What every drafter does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgate.contract import DraftSource

__all__ = ["Draft", "DraftQuery", "Drafter"]


@dataclass(frozen=True)
class DraftQuery:
    """A row that may be drafted for."""

    row_id: int
    """Names the row as long as it lives, wherever it lies in the batch."""
    tokens: Sequence[int]
    """All its tokens so far, prompt and output."""
    count: int
    """Most tokens to draft, at least 1."""


@dataclass(frozen=True)
class Draft:
    """What was drafted for a row."""

    token_ids: tuple[int, ...] = ()
    """The drafted tokens, at most as many as asked for; may be none."""
    probabilities: torch.Tensor | None = None
    """The distributions they were drawn from, [tokens, vocab]; None: not by chance."""


class Drafter(ABC):
    """Proposes tokens for many rows at once and follows what became of them."""

    source: DraftSource
    """How its drafts are named in a response."""

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        """One draft for each query, in order. Each row must be synced to its last token."""

    @abstractmethod
    def observe(self, row_id: int, tokens: Sequence[int], upto: int) -> None:
        """The first `upto` of the row's `tokens` are settled: prompt, accepted or the target's."""

    @abstractmethod
    def reset(self, row_id: int) -> None:
        """Forget the row: it has left, or will be observed from its start again."""

    @abstractmethod
    def synced_upto(self, row_id: int) -> int:
        """How many of the row's tokens the drafter has taken in."""
