"""How often the head says what the target says, and what verification would accept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.data import Batch
from training.loss import Teacher
from training.network import EagleNetwork

__all__ = ["Agreement", "agreement"]


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
    accepted: tuple[int, ...]
    """Those steps that accepted each position."""

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            _sum(self.seen, other.seen),
            _sum(self.agreed, other.agreed),
            self.verify_steps + other.verify_steps,
            _sum(self.accepted, other.accepted),
        )

    @property
    def rates(self) -> list[float]:
        """Shares that agreed at each position, over all chains."""
        return [a / max(n, 1) for a, n in zip(self.agreed, self.seen, strict=True)]

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
        found = torch.zeros(judged.shape, dtype=torch.bool)
        choices = F.linear(output[judged].float(), network.lm_head.weight).argmax(-1)
        found[judged] = choices == wanted[:, step : step + answers][judged]
        seen.append(int(judged.sum()))
        hits.append(found)
    # How many drafts of the chain from each token would be accepted.
    lengths = torch.stack(hits, dim=2).long().cumprod(2).sum(2)  # [batch, answers]
    verify_steps, accepted = _walk(lengths.tolist(), valid[:, :answers].sum(1).tolist(), steps)
    agreed = tuple(int(found.sum()) for found in hits)
    return Agreement(tuple(seen), agreed, verify_steps, accepted)


def _walk(
    lengths: Sequence[Sequence[int]], upto: Sequence[int], steps: int
) -> tuple[int, tuple[int, ...]]:
    """Verify steps over some answers, and those that accept each of `steps` positions.

    lengths: [answers, tokens] accepted drafts of a step that begins there; upto: [answers] tokens.
    """
    verify_steps, accepted = 0, [0] * steps
    for row, end in zip(lengths, upto, strict=True):
        at = 0
        while at < end:
            verify_steps += 1
            for position in range(row[at]):
                accepted[position] += 1
            at += 1 + row[at]
    return verify_steps, tuple(accepted)


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
