"""Drafting with a smaller model of the same vocabulary, for all rows at once.

What the model keeps for a position depends on the tokens up to there and on nothing else. So it
follows the target without a pass of its own: before a row drafts, one pass takes in whatever tokens
of it the model lacks, and of what it took in while drafting, the part that was accepted stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftgate.contract import DraftSource
from draftgate.engine.attention import RowSpan
from draftgate.engine.config import ModelConfig
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.chain import Chain, drafting, lengthen
from draftgate.engine.drafters.fit import check_sizes, check_vocabulary
from draftgate.engine.kv_cache import KVStore
from draftgate.engine.model import Target, load_target

__all__ = ["DraftModelDrafter"]

_STEADY_TOKENS = 2
"""What a row that drafts at every step lacks: its newest token, and where all its drafts were
accepted, the last of them."""

_CATCH_UP_TOKENS = 512
"""Most tokens beyond those that one step takes in for all rows together, so that a long prompt does
not hold up the rows that decode."""


@dataclass
class _Row:
    """What the cache holds of a row."""

    synced: int = 0
    """Positions before it are the row's for good; never more than the target has computed."""
    slot: int = -1
    """Where the row was when it was last drafted for."""
    ahead: int = 0
    """Positions from there on that the last draft was made with: of the row's newest token, and of
    the drafts but the last. A row that moves before they are verified leaves them behind."""


class DraftModelDrafter(Drafter):
    """Drafts with a model of its own."""

    def __init__(self, folder: Path, target: Target) -> None:
        """Load the checkpoint in `folder`, in the target's dtype and on its device.

        Raises DraftgateError when it is no checkpoint, or one of another vocabulary.
        """
        shape = ModelConfig.load(folder).shape
        check_sizes(folder, {"vocab_size": (shape.vocab_size, target.config.shape.vocab_size)})
        check_vocabulary(folder, target)
        self._model = load_target(folder, target.dtype, target.device)
        self._rows: dict[int, _Row] = {}
        self._generator = torch.Generator(device=target.device)
        self._generator.seed()
        self.kv_shape = self._model.kv_shape

    def attach(self, store: KVStore) -> None:
        self._store = store

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        chains = [Chain(query, self._count(query)) for query in queries]
        active = drafting(chains)
        if active:
            active, logits = self._catch_up(active)
            if active:
                self._draft(active, logits)
        return [chain.draft(DraftSource.DRAFT_MODEL) for chain in chains]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        for settled in rows:
            row = self._rows.get(settled.row_id)
            if row is None:
                continue
            if row.slot == settled.slot:
                # Up to there the drafts were accepted; the target's newest token is none of them.
                row.synced = min(row.synced + row.ahead, settled.computed)
            row.ahead = 0

    def reset(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        row = self._rows.get(row_id)
        return row.synced if row is not None else 0

    def _count(self, query: DraftQuery) -> int:
        """How many tokens to draft: none beyond the longest context that the model is made for."""
        # The last of them is not taken in.
        room = self._model.config.shape.max_positions - len(query.tokens) + 1
        return max(min(query.count, room), 0)

    def _catch_up(self, chains: Sequence[Chain]) -> tuple[list[Chain], torch.Tensor]:
        """Take in what the rows lack, as far as one step may, those that lack least first.

        Returns the chains whose rows lack nothing now, in the same order, and the logits
        [those chains, vocab] after their last token.
        """
        left = _CATCH_UP_TOKENS
        upto: dict[int, int] = {}
        for query in sorted((chain.query for chain in chains), key=self._lacking):
            count = min(self._lacking(query), _STEADY_TOKENS + left)
            left -= max(count - _STEADY_TOKENS, 0)
            upto[query.row_id] = self.synced_upto(query.row_id) + count
        ready: list[Chain] = []
        spans: list[RowSpan] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        for chain in chains:
            query = chain.query
            row = self._rows.setdefault(query.row_id, _Row())
            row.slot, end = query.slot, upto[query.row_id]
            spans.append(RowSpan(query.slot, row.synced, end - row.synced))
            token_ids.extend(query.tokens[row.synced : end])
            # The target has not computed the newest token yet.
            row.synced = min(end, len(query.tokens) - 1)
            row.ahead = end - row.synced
            if row.ahead:
                ready.append(chain)
                wanted.append(len(token_ids) - 1)
        return ready, self._logits(token_ids, spans, wanted)

    def _lacking(self, query: DraftQuery) -> int:
        return len(query.tokens) - self.synced_upto(query.row_id)

    def _draft(self, active: list[Chain], logits: torch.Tensor) -> None:
        """Add tokens to the chains, the longest first. logits: after the rows' last tokens."""
        for step in range(active[0].count):
            active = [chain for chain in active if chain.count > step]
            if step:
                newest = [chain.ids[-1] for chain in active]
                spans = []
                for chain in active:
                    query = chain.query
                    spans.append(RowSpan(query.slot, len(query.tokens) + step - 1, 1))
                    self._rows[query.row_id].ahead += 1
                logits = self._logits(newest, spans, range(len(newest)))
            lengthen(active, logits, self._generator)

    def _logits(
        self, token_ids: Sequence[int], spans: Sequence[RowSpan], wanted: Sequence[int]
    ) -> torch.Tensor:
        """One pass of the model, as `Target.forward`."""
        device = self._model.device
        tokens = torch.tensor(token_ids, device=device)
        places = torch.tensor(list(wanted), dtype=torch.long, device=device)
        return self._model.forward(tokens, spans, self._store, places).logits
