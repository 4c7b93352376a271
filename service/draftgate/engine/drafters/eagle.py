"""Drafting with an EAGLE-3 head, for all rows at once: a tree of tokens, or a chain.

A chain is for rows that draw by chance under rejection sampling: their drafts have to be drawn.

The head has one decoder layer, so the keys and values of a position depend on nothing but that
position's own input. While it drafts, every pass of the target therefore ends with one small pass
that takes in what was settled. While nothing is drafted, what it needs of a few passes is kept and
taken in at once, which costs little more than one pass's; so a row that drafts again after any time
without drafting finds its cache as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftgate.contract import DraftSource
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.branches import Branches
from draftgate.engine.drafters.chain import Chain, drafting, lengthen
from draftgate.engine.drafters.eagle_head import EagleHead
from draftgate.engine.drafters.selection import likeliest
from draftgate.engine.kv_cache import KVStore
from draftgate.engine.model import packed_places

__all__ = ["EagleDrafter"]

_READ = 3
"""Most tokens of a tree that are read, for each that is drafted in the end."""


_LATER_TOKENS = 8
"""While nothing is drafted, a row's tokens are taken in as soon as there are so many."""


@dataclass
class _Row:
    """What is known of a row."""

    kept_from: int = 0
    """Positions before it are taken in ..."""
    kept_upto: int = 0
    """... and of those from there up to this one features are kept,"""
    kept: list[torch.Tensor] = field(default_factory=list)
    """[tokens, taps * hidden] of each pass."""
    newest: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of the last position taken in, ready to be read out: [2 * hidden] from `EagleHead.take_in`
    and [hidden] fused features."""

    def keep(self, span: RowSpan, features: torch.Tensor) -> None:
        """To be taken in later."""
        if not self.kept:
            self.kept_from = span.start
        self.kept_upto = span.length
        self.kept.append(features)

    def taken_in(self, inputs: torch.Tensor, hidden: torch.Tensor) -> None:
        """All that was kept."""
        self.kept_from, self.kept, self.newest = self.kept_upto, [], (inputs, hidden)


class EagleDrafter(Drafter):
    """Drafts with an EAGLE-3 head."""

    def __init__(self, head: EagleHead, width: int) -> None:
        """width: most tokens that follow one token of a tree, and most tokens of one level that
        any follow; 1 drafts chains."""
        self._head = head
        self._width = width
        self._rows: dict[int, _Row] = {}
        self._vocabulary = head.vocabulary.tolist()
        self._device = head.vocabulary.device
        self._generator = torch.Generator(device=self._device)
        self._generator.seed()
        self.taps = head.config.taps
        self.kv_shape = head.kv_shape

    def attach(self, store: KVStore) -> None:
        self._store = store

    def places(self, count: int) -> int:
        return count if self._width == 1 else _READ * count

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        ready = [query for query in queries if self._ready(query)]
        self._take_in(ready)
        chains = [Chain(query, query.count) for query in ready if not self._branches(query)]
        trees = [Branches(query, query.count) for query in ready if self._branches(query)]
        if chains:
            self._draft_chains(drafting(chains))
        if trees:
            self._draft_trees(trees)
        drafts = {tree.query.row_id: tree.draft(DraftSource.EAGLE) for tree in trees}
        for chain in chains:
            drafts[chain.query.row_id] = chain.draft(DraftSource.EAGLE, self._head.vocabulary)
        return [drafts.get(query.row_id, Draft()) for query in queries]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is not None
        spans: list[RowSpan] = []
        packed: list[int] = []
        for row in rows:
            # The position before the last token is the last whose next token is known.
            span = RowSpan(row.slot, row.start, min(row.computed, len(row.tokens) - 1) - row.start)
            spans.append(span)
            packed.extend(row.packed[: span.count])
        chosen = features.index_select(0, self._tensor(packed))
        due = False
        for row, span, part in zip(
            rows, spans, torch.split(chosen, [span.count for span in spans]), strict=True
        ):
            known = self._rows.setdefault(row.row_id, _Row())
            known.keep(span, part)
            due = due or bool(row.draft.token_ids)
            due = due or known.kept_upto - known.kept_from >= _LATER_TOKENS
        if due:
            self._take_in(rows)

    def reset(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        row = self._rows.get(row_id)
        return row.kept_upto + 1 if row is not None else 0

    def _take_in(self, rows: Sequence[DraftQuery | Settled]) -> None:
        """Write the keys and values of all that was kept of these rows."""
        known = [self._rows[row.row_id] for row in rows]
        behind = [(row, kept) for row, kept in zip(rows, known, strict=True) if kept.kept]
        if not behind:
            return
        tokens: list[int] = []
        parts: list[torch.Tensor] = []
        spans = []
        for row, kept in behind:
            # Where the row lies now: it may have moved since its features were kept.
            spans.append(RowSpan(row.slot, kept.kept_from, kept.kept_upto - kept.kept_from))
            tokens.extend(row.tokens[kept.kept_from + 1 : kept.kept_upto + 1])
            parts.extend(kept.kept)
        hidden = self._head.fused(torch.cat(parts))
        where, positions = packed_places(spans, self._store, self._device)
        inputs = self._head.take_in(self._tensor(tokens), hidden, positions, where, self._store)
        end = -1
        for (_, kept), span in zip(behind, spans, strict=True):
            end += span.count
            kept.taken_in(inputs[end], hidden[end])

    def _ready(self, query: DraftQuery) -> bool:
        return self.synced_upto(query.row_id) == len(query.tokens)

    def _branches(self, query: DraftQuery) -> bool:
        params = query.sampler.params
        return self._width > 1 and (params.greedy or params.coupled)

    def _draft_trees(self, trees: Sequence[Branches]) -> None:
        """Find each tree's tokens, all trees level by level."""
        queries = [tree.query for tree in trees]
        inputs, hidden = self._newest(queries)
        spans = [RowSpan(query.slot, len(query.tokens) - 2, 1) for query in queries]
        _, positions = packed_places(spans, self._store, self._device)
        level = [(tree, [-1]) for tree in trees]  # whose children are looked for
        while True:
            plan = self._head.plan(spans)
            hidden, logits = self._head.read_out(inputs, hidden, positions, plan, self._store)
            samplers = [tree.query.sampler for tree, numbers in level for _ in numbers]
            # Position i foretells token i + 2.
            following = (positions + 2).tolist()
            found = likeliest(logits, samplers, following, self._head.vocabulary, self._width)
            rows: list[int] = []  # where in `hidden` the parent of each token to read was read
            tokens: list[int] = []
            spans, deeper, at = [], [], 0
            for tree, numbers in level:
                upto = at + len(numbers)
                ids = [[self._vocabulary[i] for i in children] for children in found.ids[at:upto]]
                tree.add_level(numbers, ids, found.log_likelihoods[at:upto])
                chosen = tree.next_level(self._width, self.places(tree.count))
                if chosen:
                    nodes = [tree.nodes[number] for number in chosen]
                    rows += [at + numbers.index(node.parent) for node in nodes]
                    tokens += [node.token for node in nodes]
                    spans.append(self._level_span(tree, len(chosen)))
                    deeper.append((tree, chosen))
                at = upto
            if not deeper:
                return
            level = deeper
            hidden = hidden.index_select(0, self._tensor(rows))
            where, positions = packed_places(spans, self._store, self._device)
            taken = self._tensor(tokens)
            inputs = self._head.take_in(taken, hidden, positions, where, self._store)

    def _level_span(self, tree: Branches, count: int) -> RowSpan:
        """The `count` tokens of a tree that are read next, after those read before."""
        start = len(tree.query.tokens) - 1 + len(tree.read) - count
        return RowSpan(tree.query.slot, start, count, tree.read_tree())

    def _newest(self, queries: Sequence[DraftQuery]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [rows, 2 * hidden] and hidden [rows, hidden] of the last settled positions."""
        inputs, hidden = [], []
        for query in queries:
            newest = self._rows[query.row_id].newest
            assert newest is not None
            inputs.append(newest[0])
            hidden.append(newest[1])
        return torch.stack(inputs), torch.stack(hidden)

    def _draft_chains(self, active: list[Chain]) -> None:
        """Add tokens to the chains, those that want most first, until each has what it wants."""
        inputs, hidden = self._newest([chain.query for chain in active])
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
