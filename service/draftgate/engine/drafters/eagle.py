"""Drafting a chain of tokens with an EAGLE-3 head, for all rows at once.

The head has one decoder layer, so the keys and values of a position depend on nothing but that
position's own input. Every pass of the target therefore ends with one small pass that takes in
what was settled, whether or not anything is drafted: the drafter never falls behind, and a row
that drafts again after any time without drafting finds its cache as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgate.contract import DraftSource
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.chain import Chain, drafting, lengthen
from draftgate.engine.drafters.eagle_head import EagleHead
from draftgate.engine.kv_cache import KVStore
from draftgate.engine.model import packed_places

__all__ = ["EagleDrafter"]


@dataclass(frozen=True)
class _Row:
    """Where a row stands: its last settled position, ready to be read out."""

    synced_upto: int
    inputs: torch.Tensor
    """[2 * hidden] from `EagleHead.take_in`."""
    hidden: torch.Tensor
    """[hidden] fused features."""


class EagleDrafter(Drafter):
    """Drafts with an EAGLE-3 head."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self._rows: dict[int, _Row] = {}
        self._vocabulary = head.vocabulary.tolist()
        self._device = head.vocabulary.device
        self._generator = torch.Generator(device=self._device)
        self._generator.seed()
        self.taps = head.config.taps
        self.kv_shape = head.kv_shape

    def attach(self, store: KVStore) -> None:
        self._store = store

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        chains = [Chain(query, query.count if self._ready(query) else 0) for query in queries]
        active = drafting(chains)
        if active:
            self._draft(active)
        return [chain.draft(DraftSource.EAGLE, self._head.vocabulary) for chain in chains]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is not None
        tokens: list[int] = []
        packed: list[int] = []
        spans = []
        for row in rows:
            # The position before the last token is the last whose next token is known.
            span = RowSpan(row.slot, row.start, min(row.computed, len(row.tokens) - 1) - row.start)
            spans.append(span)
            tokens.extend(row.tokens[span.start + 1 : span.length + 1])
            packed.extend(range(row.packed, row.packed + span.count))
        chosen = features.index_select(0, self._tensor(packed))
        hidden = self._head.fused(chosen)
        where, positions = packed_places(spans, self._store, self._device)
        inputs = self._head.take_in(self._tensor(tokens), hidden, positions, where, self._store)
        end = -1
        for row, span in zip(rows, spans, strict=True):
            end += span.count
            self._rows[row.row_id] = _Row(span.length + 1, inputs[end], hidden[end])

    def reset(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        row = self._rows.get(row_id)
        return row.synced_upto if row is not None else 0

    def _ready(self, query: DraftQuery) -> bool:
        return self.synced_upto(query.row_id) == len(query.tokens)

    def _draft(self, active: list[Chain]) -> None:
        """Add tokens to the chains, those that want most first, until each has what it wants."""
        known = [self._rows[chain.query.row_id] for chain in active]
        inputs = torch.stack([row.inputs for row in known])
        hidden = torch.stack([row.hidden for row in known])
        for step in range(active[0].count):
            active = [chain for chain in active if chain.count > step]
            rows = [chain.query for chain in active]
            # The newest position, one further each time.
            spans = [RowSpan(query.slot, len(query.tokens) - 2 + step, 1) for query in rows]
            where, positions = packed_places(spans, self._store, self._device)
            inputs, hidden = inputs[: len(rows)], hidden[: len(rows)]
            if step:
                last = self._tensor([chain.ids[-1] for chain in active])
                inputs = self._head.take_in(last, hidden, positions, where, self._store)
            plan = self._head.plan(spans)
            hidden, logits = self._head.read_out(inputs, hidden, positions, plan, self._store)
            lengthen(active, logits, self._generator, self._head.vocabulary, self._vocabulary)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
