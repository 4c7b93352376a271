"""What a model's drafter has drafted so far for each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftgate.contract import DraftSource
from draftgate.engine.drafters.base import Draft, DraftQuery
from draftgate.engine.drafters.selection import pick

__all__ = ["Chain", "drafting", "lengthen"]


@dataclass
class Chain:
    """The tokens drafted for one query, one after the other."""

    query: DraftQuery
    count: int
    """How many tokens it is to have; 0: none are drafted."""
    ids: list[int] = field(default_factory=list)
    """The target's ids of those drafted so far."""
    probabilities: list[torch.Tensor] = field(default_factory=list)
    """What each was drawn from, [n] in fp32; unless no row of its batch drew by chance."""

    def draft(self, source: DraftSource, vocabulary: torch.Tensor | None = None) -> Draft:
        """The finished draft. vocabulary: [n] int64, as in `Draft`."""
        params = self.query.sampler.params
        told = bool(self.ids) and not params.greedy and not params.coupled
        return Draft(
            token_ids=tuple(self.ids),
            source=source,
            probabilities=torch.stack(self.probabilities) if told else None,
            vocabulary=vocabulary if told else None,
        )


def drafting(chains: Sequence[Chain]) -> list[Chain]:
    """Those that are to have tokens, the longest first: as steps go by, rows leave the batch from
    its end."""
    return sorted((chain for chain in chains if chain.count), key=lambda chain: -chain.count)


def lengthen(
    chains: Sequence[Chain],
    logits: torch.Tensor,
    generator: torch.Generator,
    vocabulary: torch.Tensor | None = None,
    ids: Sequence[int] | None = None,
) -> None:
    """Pick the next token of each chain.

    logits: [chains, n]. vocabulary and ids: the target's ids of those n tokens, twice; None when
    they are the target's.
    """
    picked = pick(
        logits,
        [chain.query.sampler for chain in chains],
        [len(chain.query.tokens) + len(chain.ids) for chain in chains],
        vocabulary,
        generator,
    )
    for index, chain in enumerate(chains):
        token = picked.ids[index]
        chain.ids.append(token if ids is None else ids[token])
        if picked.probabilities is not None:
            chain.probabilities.append(picked.probabilities[index])
