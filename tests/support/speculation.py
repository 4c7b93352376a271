"""Prompts whose continuation is known, and drafters that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from draftgate.engine import Target
from draftgate.engine.drafters import (
    Draft,
    Drafter,
    DraftQuery,
    EagleDrafter,
    EagleHead,
    HybridDrafter,
    NgramDrafter,
    Settled,
)
from draftgate.engine.kv_cache import KVStore
from draftgate.engine.tree import chain_parents
from draftgate.sampling import SamplingParams
from tests.support.engine import ScriptedDrafter, greedy, running, sampled

PROMPTS = {f"{n}": tuple((11 * i * i + n * i + n) % 96 for i in range(5 + 7 * n)) for n in range(6)}

VARIED = greedy(40, repetition_penalty=1.3, frequency_penalty=0.4)
"""For what needs tokens that differ: plain greedy soon repeats itself."""

SETTINGS: dict[str, SamplingParams] = {
    "greedy": greedy(40),
    "greedy with penalties": VARIED,
    "seeded": sampled(40, seed=7, temperature=1.4),
    "seeded with filters": sampled(
        40, seed=2**64 - 1, temperature=1.2, top_k=30, top_p=0.9, min_p=0.01
    ),
    "seeded with penalties": sampled(40, seed=0, presence_penalty=0.5, repetition_penalty=1.2),
}
"""Those whose tokens do not depend on what is drafted."""


def model_drafter(kind: str, folder: Path, target: Target) -> Drafter:
    """The EAGLE drafter of a folder, of chains or of a `tree`, or a `hybrid` with it."""
    eagle = EagleDrafter(EagleHead(folder, target), 4 if kind == "tree" else 1)
    return HybridDrafter(NgramDrafter(1, 4), eagle) if kind == "hybrid" else eagle


def alone(target: Target, params: SamplingParams) -> dict[str, list[int]]:
    """The tokens of each of PROMPTS, without speculation and with nothing else in the batch."""
    with running(target, drafter="none", max_batch_rows=1) as engine:
        return {name: engine.one(ids, params).tokens for name, ids in PROMPTS.items()}


def oracle(
    expected: Mapping[str, Sequence[int]], prompts: Mapping[str, Sequence[int]] = PROMPTS
) -> Callable[[DraftQuery], list[int]]:
    """What comes next for a row, known from a run without speculation."""
    whole = [[*ids, *expected[name]] for name, ids in prompts.items()]

    def following(query: DraftQuery) -> list[int]:
        for tokens in whole:
            if tokens[: len(query.tokens)] == list(query.tokens):
                return tokens[len(query.tokens) :][: query.count]
        raise AssertionError("a row has left its path")

    return following


def unsteady(following: Callable[[DraftQuery], list[int]], seed: int) -> ScriptedDrafter:
    """Right, wrong, right for a while, random or silent, as many as it likes, row by row."""
    random = np.random.default_rng(seed)

    def rule(query: DraftQuery) -> Draft:
        right = following(query)
        tokens = list(right)
        kind = random.integers(5)
        if kind == 1:
            tokens = [(token + 1) % 96 for token in tokens]
        elif kind == 2 and tokens:
            at = random.integers(len(tokens))
            tokens[at] = (tokens[at] + 1) % 96
        elif kind == 3:
            tokens = random.integers(0, 96, query.count).tolist()
        elif kind == 4:
            tokens = []
        return Draft(tuple(tokens[: random.integers(0, query.count + 1)]))

    return ScriptedDrafter(rule)


def branching(
    following: Callable[[DraftQuery], list[int]], seed: int
) -> Callable[[DraftQuery], Draft]:
    """Random trees, in which what comes next is often a branch."""
    random = np.random.default_rng(seed)

    def rule(query: DraftQuery) -> Draft:
        right = following(query)
        nodes: dict[tuple[int, int], int] = {}  # parent and token of each place
        at, matched = -1, 0  # the end of the right branch, and its length
        for _ in range(int(random.integers(0, query.count + 1))):
            if matched < len(right) and random.random() < 0.6:
                node = (at, right[matched])
            else:
                node = (int(random.integers(-1, len(nodes))), int(random.integers(96)))
            place = nodes.setdefault(node, len(nodes))
            if matched < len(right) and node == (at, right[matched]):
                at, matched = place, matched + 1
        parents = tuple(parent for parent, _ in nodes)
        chain = parents == tuple(chain_parents(len(parents)))
        return Draft(tuple(token for _, token in nodes), tree=() if chain else parents)

    return rule


def paces(seed: int, most: int) -> Callable[[DraftQuery], int]:
    """Another number of tokens for each row at each step, often none."""
    random = np.random.default_rng(seed)
    return lambda query: max(int(random.integers(-1, most + 1)), 0)


def sometimes_right(
    following: Callable[[DraftQuery], list[int]], seed: int, share: float = 0.4
) -> Callable[[DraftQuery, Draft], Draft]:
    """Puts what will come in place of what was drafted: all of it in a share of the drafts, else
    up to anywhere, with the drafter's own tokens beyond. For rows whose drafts are compared."""
    random = np.random.default_rng(seed)

    def answer(query: DraftQuery, draft: Draft) -> Draft:
        count = len(draft.token_ids)
        upto = count if random.random() < share else int(random.integers(count + 1))
        right = following(query)[:upto]
        return Draft((*right, *draft.token_ids[len(right) :]), draft.source)

    return answer


def within(rule: Callable[[DraftQuery], Draft]) -> Callable[[DraftQuery, Draft], Draft]:
    """Puts what the rule says in place of what was drafted, no more of it."""

    def answer(query: DraftQuery, draft: Draft) -> Draft:
        return replace(rule(replace(query, count=len(draft.token_ids))), source=draft.source)

    return answer


class PacedDrafter(Drafter):
    """Has another drafter draft as many tokens as a pace says, and checks that it keeps in step."""

    def __init__(
        self,
        inner: Drafter,
        pace: Callable[[DraftQuery], int],
        answer: Callable[[DraftQuery, Draft], Draft] | None = None,
        *,
        idle: bool = False,
    ) -> None:
        """pace: how many tokens to draft for a query, at most its count. answer: what is proposed
        in place of what was drafted, no more of it. idle: draft all that was asked for, and cut it
        to the pace after that.
        """
        self.inner = inner
        self._pace = pace
        self._answer = answer
        self._idle = idle
        self.taps, self.kv_shape = inner.taps, inner.kv_shape

    def attach(self, store: KVStore) -> None:
        self.inner.attach(store)

    def places(self, count: int) -> int:
        return self.inner.places(count)

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        counts = [min(self._pace(query), query.count) for query in queries]
        asked = [
            query if self._idle else _counted(query, count)
            for query, count in zip(queries, counts, strict=True)
            if count or self._idle
        ]
        found = {q.row_id: d for q, d in zip(asked, self.inner.propose(asked), strict=True)}
        drafts = []
        for query, count in zip(queries, counts, strict=True):
            draft = cut(found[query.row_id], count) if count else Draft()
            if count and self._answer is not None:
                draft = self._answer(_counted(query, count), draft)
            drafts.append(draft)
        return drafts

    def shadow(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        return self.inner.shadow(queries)

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        self.inner.observe(rows, features)
        for row in rows:
            assert self.inner.synced_upto(row.row_id) == row.upto, "the drafter fell behind"

    def reset(self, row_id: int) -> None:
        self.inner.reset(row_id)

    def synced_upto(self, row_id: int) -> int:
        return self.inner.synced_upto(row_id)


def cut(draft: Draft, count: int) -> Draft:
    """Its first `count` tokens."""
    told = draft.probabilities
    return replace(
        draft,
        token_ids=draft.token_ids[:count],
        tree=draft.tree[:count],
        probabilities=None if told is None else told[:count],
    )


def _counted(query: DraftQuery, count: int) -> DraftQuery:
    return DraftQuery(query.row_id, query.slot, query.tokens, count, query.sampler)
