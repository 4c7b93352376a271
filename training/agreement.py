"""How often the head says what the target says, and what verification would accept of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.data import Batch
from training.loss import Teacher
from training.network import EagleNetwork

__all__ = ["Agreement", "agreement"]

_RANKS = 4
"""How many of the head's choices are looked at."""


@dataclass(frozen=True)
class Agreement:
    """Sums over answers, by position of the chain."""

    seen: tuple[int, ...]
    """Chains that could be judged at each position, one from every token."""
    agreed: tuple[int, ...]
    """Those whose token there was the target's, the true tokens fed back."""
    verify_steps: int
    """Steps of greedy verification over the answers: each begins where the one before ended, so
    hard places count more than among all chains."""
    ranked: tuple[tuple[int, ...], ...]
    """Of the steps that accepted all positions before: how often the target's token was the first,
    second, ... choice here. The first choices are the accepted ones."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            _sum(self.seen, other.seen),
            _sum(self.agreed, other.agreed),
            self.verify_steps + other.verify_steps,
            tuple(_sum(a, b) for a, b in zip(self.ranked, other.ranked, strict=True)),
        )

    @property
    def rates(self) -> list[float]:
        """Shares that agreed at each position, over all chains."""
        return [a / max(n, 1) for a, n in zip(self.agreed, self.seen, strict=True)]

    @property
    def accepted(self) -> list[int]:
        """Verify steps that accepted each position."""
        return [row[0] for row in self.ranked]

    @property
    def rank_shares(self) -> list[list[float]]:
        """Of the verify steps that came so far, the shares of first, second, ... choices."""
        reached = [self.verify_steps, *self.accepted[:-1]]
        return [[n / max(of, 1) for n in row] for row, of in zip(self.ranked, reached, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / verify steps."""
        return 1 + sum(self.accepted) / max(self.verify_steps, 1)


@torch.no_grad()
def agreement(network: EagleNetwork, teacher: Teacher, batch: Batch, steps: int) -> Agreement:
    """Judge chains of `steps` drafts. A token outside the draft vocabulary is never agreed on."""
    valid = batch.valid
    wanted = torch.full(valid.shape, -1, dtype=torch.long)
    wanted[valid] = teacher.distributions(batch.last_hidden[valid], 0.0).float().argmax(-1)
    wanted[~batch.foretellable] = -1
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch.unrolled, steps)
    answers = hidden[0].shape[1]
    seen, hits = [], []
    for step, output in enumerate(hidden):
        judged = valid[:, step : step + answers]
        found = torch.zeros(*judged.shape, _RANKS, dtype=torch.bool)
        choices = F.linear(output[judged].float(), network.lm_head.weight).topk(_RANKS, -1).indices
        found[judged] = choices == wanted[:, step : step + answers][judged].unsqueeze(-1)
        seen.append(int(judged.sum()))
        hits.append(found)
    verify_steps, ranked = 0, [[0] * _RANKS for _ in range(steps)]
    table = torch.stack(hits, dim=2).tolist()  # [batch, answers, steps, ranks]
    for row, length in zip(table, valid[:, :answers].sum(1).tolist(), strict=True):
        at = 0
        while at < length:
            verify_steps += 1
            at += 1 + _verify(row[at], ranked)
    return Agreement(
        tuple(seen),
        tuple(int(found[..., 0].sum()) for found in hits),
        verify_steps,
        tuple(tuple(counts) for counts in ranked),
    )


def _verify(hits: list[list[bool]], ranked: list[list[int]]) -> int:
    """Count a chain's choices into `ranked`, up to the first wrong one; how many are right."""
    for accepted, choices in enumerate(hits):
        for rank, hit in enumerate(choices):
            ranked[accepted][rank] += hit
        if not choices[0]:
            return accepted
    return len(hits)


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
