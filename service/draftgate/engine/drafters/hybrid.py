"""Prompt lookup where it pays, a model's drafts elsewhere: chosen for each row at each step.

A source's worth to a row is how many tokens of the draft that is wanted now are likely to stand. It
is learned from the row's own steps with older ones forgotten, as the share of a source's drafted
tokens that stood of those that were looked at: that means the same whether drafts were long or
short, which the gate changes all the time. A match's share is learned by its length: long matches
mostly go on as before, short ones mostly by accident. The choice looks at past steps alone, so it
cannot bias what is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.ngram import NgramDrafter
from draftgate.engine.kv_cache import KVStore
from draftgate.engine.tree import depths

__all__ = ["HybridDrafter"]

_MODEL = 0
"""The model's place among the sources; a match's is its length."""

_EXPECTED: Mapping[int, float] = {_MODEL: 0.55, 1: 0.34, 2: 0.62, 3: 0.74, 4: 0.79, 5: 0.82}
"""Share of the tokens that stand before a row has told anything; of a longer match
`_EXPECTED_LONG`. They give the tokens accepted at K = 4 on 500 greedy answers of
SmolLM2-135M-Instruct to chat, code and rewriting."""

_EXPECTED_LONG = 0.92

_PRIOR_TOKENS = 4.0
"""How many tokens of its own a row needs to outweigh that: those of about two steps."""

_KEPT = 0.85
"""What is kept of the past at each verify step: half of it after four. A source that has fallen
behind is so tried again in the end."""


class HybridDrafter(Drafter):
    """Chooses between an n-gram drafter and a model's."""

    def __init__(self, ngram: NgramDrafter, model: Drafter) -> None:
        self._ngram = ngram
        self._model = model
        self._shares: dict[int, dict[int, _Share]] = {}
        self._chosen: dict[int, int] = {}
        self.taps = model.taps
        self.kv_shape = model.kv_shape

    def attach(self, store: KVStore) -> None:
        self._model.attach(store)

    def places(self, count: int) -> int:
        return max(self._ngram.places(count), self._model.places(count))

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        left = []
        for query in queries:
            size, draft = self._preferred(query)
            self._chosen[query.row_id] = size
            if size == _MODEL:
                left.append(query)
            else:
                drafts[query.row_id] = draft
        for query, draft in zip(left, self._model.propose(left), strict=True):
            drafts[query.row_id] = draft
        return [drafts[query.row_id] for query in queries]

    def shadow(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return [self._preferred(query)[1] for query in queries]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        for row in rows:
            if row.draft.token_ids:
                shares = self._shares.setdefault(row.row_id, {})
                for share in shares.values():
                    share.fade()
                longest = max(depths(row.draft.parents))
                source = shares.setdefault(self._chosen[row.row_id], _Share())
                source.add(row.accepted, failed=row.accepted < longest)
        self._ngram.observe(rows, None)
        self._model.observe(rows, features)

    def reset(self, row_id: int) -> None:
        self._shares.pop(row_id, None)
        self._chosen.pop(row_id, None)
        self._ngram.reset(row_id)
        self._model.reset(row_id)

    def synced_upto(self, row_id: int) -> int:
        return min(self._ngram.synced_upto(row_id), self._model.synced_upto(row_id))

    def _preferred(self, query: DraftQuery) -> tuple[int, Draft]:
        """The length of the match to follow, with its draft; `_MODEL` and none for the model."""
        size, draft = self._ngram.look_up(query)
        if size and self._worth(query, size, len(draft.token_ids)) >= self._worth(
            query, _MODEL, query.count
        ):
            return size, draft
        return _MODEL, Draft()

    def _worth(self, query: DraftQuery, source: int, count: int) -> float:
        """Tokens to expect accepted of a draft of so many."""
        share = self._shares.get(query.row_id, {}).get(source, _Share())
        rate = share.mean(_EXPECTED.get(source, _EXPECTED_LONG))
        return sum(rate**place for place in range(1, count + 1))


class _Share:
    """Tokens of one source that stood, of those that came after tokens that did."""

    def __init__(self) -> None:
        self._stood = 0.0
        self._fell = 0.0

    def fade(self) -> None:
        """A step has passed, with this source or another."""
        self._stood *= _KEPT
        self._fell *= _KEPT

    def add(self, stood: int, *, failed: bool) -> None:
        """A step: so many stood, and one behind them did not, if there was one."""
        self._stood += stood
        self._fell += failed

    def mean(self, expected: float) -> float:
        """It leans to what was expected while there is little to go by."""
        return (self._stood + _PRIOR_TOKENS * expected) / (self._stood + self._fell + _PRIOR_TOKENS)
