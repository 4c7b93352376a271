"""Grouped-query attention over the KV cache for a step of ragged rows.

Query heads that share a key head are laid along the token axis, [rows, kv_heads, group * tokens,
head_dim], so the cache is read where it lies: several times faster on a CPU than expanding keys or
than `enable_gqa`. Rows that decode go through one call; a prompt chunk, or a row so much longer
than the others that padding them to its length would cost more than it saves, has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draftgate.engine.kv_cache import KVStore
from draftgate.engine.tree import depths, paths

__all__ = ["AttentionPlan", "RowSpan", "plan_attention"]

_CALL_COST = 1250
"""What one more call costs for each thread that it may leave idle, in units of attending to one
cached position from one more token (measured, a layer: 20 us on one thread, 30 us on two)."""

_READ_COST = 6
"""What reading a cached position costs in the same units."""


@dataclass(frozen=True)
class RowSpan:
    """The tokens of one row in the step."""

    slot: int
    """Its slot in the KV cache."""
    start: int
    """The place in its slot of the first of these tokens."""
    count: int
    """How many tokens it has in the step."""
    parents: Sequence[int] = ()
    """How the tokens in its last places follow each other where they are a tree (see
    `engine.tree`); the first of them may be in the cache already. Empty: one after the other."""

    @property
    def length(self) -> int:
        """Places in use once the step is done."""
        return self.start + self.count

    @property
    def trunk(self) -> int:
        """Places before the tree, where place and position are the same."""
        return self.length - len(self.parents)

    @property
    def positions(self) -> list[int]:
        """The position in its text of each of the tokens."""
        branching = [self.trunk - 1 + depth for depth in depths(self.parents)]
        return [*range(self.start, self.trunk), *branching[-self.count :]]


@dataclass(frozen=True)
class _Call:
    """One attention call over the slots `first_slot` to `last_slot` - 1, `count` tokens each."""

    first_slot: int
    last_slot: int
    count: int
    length: int
    """Cached positions it reads."""
    mask: torch.Tensor | None
    """Added to the scores, [rows, 1, group * count, length]; None where all is visible."""
    gather: torch.Tensor | None
    """[rows * count]: which packed token stands at each place; None: packed as it is."""
    packed: torch.Tensor | None
    """[n]: the packed tokens that this call answers; None: all of them, in order."""
    source: torch.Tensor | None
    """[n]: their places in the call's output."""


@dataclass(frozen=True)
class AttentionPlan:
    """How to run attention for one step; the same in every layer."""

    calls: tuple[_Call, ...]
    heads: int
    kv_heads: int
    head_dim: int

    def attend(self, query: torch.Tensor, store: KVStore, layer: int) -> torch.Tensor:
        """query [tokens, heads, head_dim] to context [tokens, heads * head_dim]."""
        if len(self.calls) == 1 and self.calls[0].packed is None:
            return self._run(self.calls[0], query, store, layer)
        out = query.new_empty(query.shape[0], self.heads * self.head_dim)
        for call in self.calls:
            answered = self._run(call, query, store, layer)
            assert call.packed is not None
            assert call.source is not None
            out.index_copy_(0, call.packed, answered.index_select(0, call.source))
        return out

    def _run(self, call: _Call, query: torch.Tensor, store: KVStore, layer: int) -> torch.Tensor:
        rows, group = call.last_slot - call.first_slot, self.heads // self.kv_heads
        if call.gather is not None:
            query = query.index_select(0, call.gather)
        shape = (rows, call.count, self.kv_heads, group, self.head_dim)
        grouped = query.view(shape).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(rows, self.kv_heads, group * call.count, self.head_dim)
        keys, values = store.read(layer, call.first_slot, call.last_slot, call.length)
        context = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=call.mask)
        context = context.view(rows, self.kv_heads, group, call.count, self.head_dim)
        return context.permute(0, 3, 1, 2, 4).reshape(rows * call.count, self.heads * self.head_dim)


def plan_attention(
    spans: Sequence[RowSpan],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionPlan:
    """Group the rows of a step, packed in the order of `spans`, into attention calls."""
    offsets = [0]
    for span in spans:
        offsets.append(offsets[-1] + span.count)
    together, alone = _split(spans)
    groups = ([together] if together else []) + [[index] for index in alone]
    calls = tuple(
        _call(spans, offsets, chosen, heads // kv_heads, dtype, device) for chosen in groups
    )
    return AttentionPlan(calls=calls, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def _split(spans: Sequence[RowSpan]) -> tuple[list[int], list[int]]:
    """Indices of spans to run in one call, and of those to run alone, by estimated cost."""
    call_cost = _CALL_COST * torch.get_num_threads()
    alone = [call_cost + _cost(1, span.count, span.length) for span in spans]
    by_cost = sorted(range(len(spans)), key=alone.__getitem__)
    together = [0]  # the cheapest 0, 1, 2, ... spans in one call
    first, last, count, length = spans[by_cost[0]].slot, 0, 0, 0
    for index in by_cost:
        span = spans[index]
        first, last = min(first, span.slot), max(last, span.slot + 1)
        count, length = max(count, span.count), max(length, span.length)
        together.append(call_cost + _cost(last - first, count, length))
    best_cost, best, apart = together[-1], len(spans), 0
    for kept in range(len(spans) - 1, -1, -1):
        apart += alone[by_cost[kept]]
        if together[kept] + apart < best_cost:
            best_cost, best = together[kept] + apart, kept
    return sorted(by_cost[:best]), sorted(by_cost[best:])


def _cost(rows: int, count: int, length: int) -> int:
    """Of the work in a call over slots of `count` tokens each."""
    return rows * length * (_READ_COST + count)


def _call(
    spans: Sequence[RowSpan],
    offsets: Sequence[int],
    chosen: Sequence[int],
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Call:
    rows = [spans[i] for i in chosen]
    first, last = min(s.slot for s in rows), max(s.slot for s in rows) + 1
    count, length = max(s.count for s in rows), max(s.length for s in rows)
    # A place without a token (a row with fewer, a slot not in this call) repeats some token and
    # sees position 0 alone; its answer is not used.
    gather = [[offsets[chosen[0]]] * count for _ in range(last - first)]
    visible = [[1] * count for _ in range(last - first)]
    leading: list[tuple[int, int, int]] = []  # row, token, and a place beyond `visible` it sees
    packed, source = [], []
    for index, span in zip(chosen, rows, strict=True):
        row = span.slot - first
        for token in range(span.count):
            gather[row][token] = offsets[index] + token
            visible[row][token] = min(span.start + token + 1, span.trunk)
            packed.append(offsets[index] + token)
            source.append(row * count + token)
        for place, path in enumerate(paths(span.parents), span.trunk):
            if place >= span.start:
                leading += [(row, place - span.start, span.trunk + above) for above in path]
    # No place is padding and the call answers every token in the order it is packed.
    whole = packed == source == list(range((last - first) * count)) and len(chosen) == len(spans)
    everything_visible = whole and all(v == length for row in visible for v in row)
    mask = None
    if not everything_visible:
        mask = _mask(visible, leading, length, group, dtype, device)
    return _Call(
        first_slot=first,
        last_slot=last,
        count=count,
        length=length,
        mask=mask,
        gather=None if whole else torch.tensor(gather, device=device).view(-1),
        packed=None if whole else torch.tensor(packed, device=device),
        source=None if whole else torch.tensor(source, device=device),
    )


def _mask(
    visible: list[list[int]],
    leading: list[tuple[int, int, int]],
    length: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[rows, 1, group * count, length]: 0 for the first `visible` places and those `leading` to a
    token of a tree, -inf elsewhere."""
    limits = torch.tensor(visible, device=device)  # [rows, count]
    hidden = torch.arange(length, device=device) >= limits.unsqueeze(-1)  # [rows, count, length]
    if leading:
        hidden[tuple(torch.tensor(leading, device=device).T)] = False
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    mask.masked_fill_(hidden, float("-inf"))
    rows, count = limits.shape
    return (
        mask.unsqueeze(1).expand(rows, group, count, length).reshape(rows, 1, group * count, length)
    )
