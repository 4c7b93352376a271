"""What a chain of drafts should say: the target's own distribution at each place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftgate.engine.weights import CheckpointReader
from training.data import Batch
from training.network import EagleNetwork

__all__ = ["Teacher", "chain_loss"]

_DECAY = 0.8
"""How much less each further position of a chain counts (as in EAGLE-3's training)."""


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
            loss = _CrossEntropy.apply(logits, targets, rows)  # type: ignore[no-untyped-call]
            total = total + _DECAY**step * loss / max(int(chosen.sum()), 1)
    return total


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
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * grad.to(gradient.dtype), None, None
