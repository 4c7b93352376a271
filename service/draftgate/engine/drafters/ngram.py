"""Prompt lookup: what followed the same few tokens the last time.

The method is prompt-lookup decoding (Saxena 2023): the longest recent n-gram that occurred before
is followed. It has no weights and no chance in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftgate.contract import DraftSource
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled

__all__ = ["NgramDrafter"]


class NgramDrafter(Drafter):
    """Looks up the last `longest` down to `shortest` tokens in the row's own past."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._rows: dict[int, _History] = {}

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return [self.look_up(query)[1] for query in queries]

    def shadow(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return self.propose(queries)

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        for row in rows:
            history = self._rows.setdefault(row.row_id, _History())
            for end in range(max(history.synced, 1), row.upto):
                for size in self._sizes:
                    if size <= end:
                        history.followed_at[tuple(row.tokens[end - size : end])] = end
            history.synced = max(history.synced, row.upto)

    def reset(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        history = self._rows.get(row_id)
        return history.synced if history is not None else 0

    def look_up(self, query: DraftQuery) -> tuple[int, Draft]:
        """A draft and how many tokens the match behind it has; 0 and nothing without a match."""
        history = self._rows.get(query.row_id)
        if history is None or history.synced != len(query.tokens):
            return 0, Draft()
        for size in self._sizes:
            start = history.followed_at.get(tuple(query.tokens[-size:]))
            if start is not None:
                ids = _continuation(query.tokens, start, query.count)
                return size, Draft(ids, DraftSource.NGRAM)
        return 0, Draft()


class _History:
    """One row's past: where each n-gram was last followed by another token."""

    def __init__(self) -> None:
        self.synced = 0
        self.followed_at: dict[tuple[int, ...], int] = {}


def _continuation(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; past the end the sequence is taken to repeat itself."""
    period = len(tokens) - start
    return tuple(tokens[start + index % period] for index in range(count))
