"""What a chain of drafts should say: the target's own distribution at each place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draftgate.engine.weights import CheckpointReader
from training.data import Batch
from training.network import EagleNetwork

__all__ = ["Agreement", "Teacher", "agreement", "chain_loss"]

_DECAY = 0.8
"""How much less each further position of a chain counts (as in EAGLE-3's training)."""


_RANKS = 4
"""How many of the head's choices are looked at."""


class Teacher:
    """The target's output over the draft vocabulary."""

    def __init__(
        self, reader: CheckpointReader, vocabulary: torch.Tensor, tied: bool, norm_eps: float
    ) -> None:
        """vocabulary: [draft vocab] ids of the target."""
        embedding = reader.stored("model.embed_tokens.weight" if tied else "lm_head.weight")
        self.head = embedding[vocabulary].to(torch.bfloat16)
        self.norm = reader.stored("model.norm.weight").float()
        self._eps = norm_eps

    def distributions(self, last_hidden: torch.Tensor, sharpness: float) -> torch.Tensor:
        """The target's distributions [n, draft vocab] in bf16 at last hidden states [n, hidden].

        A share `sharpness` of each is moved to its most likely token: greedy requests accept
        nothing else, and at temperature 0.8 it is the token drawn most.
        """
        normed = F.rms_norm(last_hidden.float(), self.norm.shape, self.norm, self._eps)
        soft = (normed.to(torch.bfloat16) @ self.head.T).float().softmax(-1)
        best = soft.argmax(-1, keepdim=True)
        soft *= 1 - sharpness
        return soft.scatter_add_(-1, best, torch.full_like(best, sharpness, dtype=soft.dtype)).to(
            torch.bfloat16
        )


@dataclass(frozen=True)
class Agreement:
    """How often the head's first choice was the target's, by position of the chain."""

    seen: tuple[int, ...]
    """Chains that could be judged at each position."""
    alone: tuple[int, ...]
    """Agreements at each position, the true tokens fed back."""
    run: tuple[int, ...]
    """Chains that agreed at this position and all before: what greedy verification accepts."""
    ranked: tuple[tuple[int, ...], ...] = ()
    """Of the chains that agreed at all positions before, how many times the target's token was the
    first, second, ... choice here."""

    def __add__(self, other: Agreement) -> Agreement:
        def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip(a, b, strict=True)) if a else b

        ranked = other.ranked
        if self.ranked:
            ranked = tuple(add(a, b) for a, b in zip(self.ranked, other.ranked, strict=True))
        return Agreement(
            add(self.seen, other.seen),
            add(self.alone, other.alone),
            add(self.run, other.run),
            ranked,
        )

    @property
    def rates(self) -> list[float]:
        return [a / max(n, 1) for a, n in zip(self.alone, self.seen, strict=True)]

    @property
    def rank_shares(self) -> list[list[float]]:
        """Shares of first, second, ... choices at each position, all positions before right."""
        reached = (self.seen[0], *self.run[:-1])
        return [[n / max(of, 1) for n in row] for row, of in zip(self.ranked, reached, strict=True)]

    @property
    def acceptance_length(self) -> float:
        """1 + the mean run of a chain: what greedy verification gains, bonus token included."""
        return 1 + sum(a / max(n, 1) for a, n in zip(self.run, self.seen, strict=True))


def chain_loss(
    network: EagleNetwork, teacher: Teacher, batch: Batch, steps: int, sharpness: float
) -> torch.Tensor:
    """Mean cross entropy to the target over all chains and positions, later ones counting less."""
    keep = batch.valid & batch.foretellable
    targets = teacher.distributions(batch.last_hidden[keep], sharpness)
    place = torch.full(keep.shape, -1, dtype=torch.long)
    place[keep] = torch.arange(len(targets))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch.unrolled, steps)
        answers = hidden[0].shape[1]
        total = torch.zeros(())
        for step, output in enumerate(hidden):
            chosen = keep[:, step : step + answers]
            logits = network.lm_head(output[chosen])
            rows = place[:, step : step + answers][chosen]
            loss = _CrossEntropy.apply(logits, targets, rows)
            total = total + _DECAY**step * loss / max(int(chosen.sum()), 1)
    return total


@torch.no_grad()
def agreement(network: EagleNetwork, teacher: Teacher, batch: Batch, steps: int) -> Agreement:
    """Judge every chain of a batch. A token outside the draft vocabulary is a disagreement."""
    places = batch.valid
    wanted = torch.full(places.shape, -1, dtype=torch.long)
    wanted[places] = teacher.distributions(batch.last_hidden[places], 0.0).float().argmax(-1)
    wanted[~batch.foretellable] = -1
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch.unrolled, steps)
    answers = hidden[0].shape[1]
    running = torch.ones_like(places[:, :answers])
    seen, alone, run, ranked = [], [], [], []
    for step, output in enumerate(hidden):
        judged = places[:, step : step + answers]
        agreed = torch.zeros_like(judged)
        logits = F.linear(output[judged].float(), network.lm_head.weight)
        hits = logits.topk(_RANKS, -1).indices == wanted[:, step : step + answers][judged][:, None]
        ranked.append(tuple(hits[running[judged]].sum(0).tolist()))
        agreed[judged] = hits[:, 0]
        running = running & agreed
        seen.append(int(judged.sum()))
        alone.append(int(agreed.sum()))
        run.append(int(running.sum()))
    return Agreement(tuple(seen), tuple(alone), tuple(run), tuple(ranked))


class _CrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of logits [n, vocab] with targets[rows]; one pass gives both ways."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        log_q = logits.float().log_softmax(-1)
        p = targets.index_select(0, rows)
        loss = -(log_q * p).sum()
        gradient = log_q.exp_().sub_(p).to(logits.dtype)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad.to(gradient.dtype), None, None
