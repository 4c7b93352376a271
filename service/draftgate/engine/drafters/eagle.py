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
        positions: list[int] = []
        where: list[int] = []
        packed: list[int] = []
        ends = []
        for row in rows:
            # The position before the last token is the last whose next token is known.
            upto = min(row.computed, len(row.tokens) - 1)
            tokens.extend(row.tokens[row.start + 1 : upto + 1])
            positions.extend(range(row.start, upto))
            first = self._store.index_of(row.slot, row.start)
            where.extend(range(first, first + upto - row.start))
            packed.extend(range(row.packed, row.packed + upto - row.start))
            ends.append(len(tokens) - 1)
        chosen = features.index_select(0, self._tensor(packed))
        hidden = self._head.fused(chosen)
        inputs = self._head.take_in(
            self._tensor(tokens), hidden, self._tensor(positions), self._tensor(where), self._store
        )
        for row, end in zip(rows, ends, strict=True):
            self._rows[row.row_id] = _Row(positions[end] + 2, inputs[end], hidden[end])

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
            # The newest position with its place in the cache, one further each time.
            at = [len(query.tokens) - 2 + step for query in rows]
            positions = self._tensor(at)
            inputs, hidden = inputs[: len(rows)], hidden[: len(rows)]
            if step:
                places = [self._store.index_of(q.slot, p) for q, p in zip(rows, at, strict=True)]
                last = self._tensor([chain.ids[-1] for chain in active])
                inputs = self._head.take_in(
                    last, hidden, positions, self._tensor(places), self._store
                )
            spans = [RowSpan(q.slot, p, 1) for q, p in zip(rows, at, strict=True)]
            plan = self._head.plan(spans)
            hidden, logits = self._head.read_out(inputs, hidden, positions, plan, self._store)
            lengthen(active, logits, self._generator, self._head.vocabulary, self._vocabulary)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
