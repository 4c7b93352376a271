"""Deciding which drafted tokens stand.

All drafts of a row were in one target pass, so the target's distribution after each of them is
known. Both ways below leave the emitted tokens distributed exactly as without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftgate.engine.sampler import draw

__all__ = ["verify_equal", "verify_rejection"]


def verify_equal(
    target_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """Accept drafts as long as one of them equals the target's own choice.

    target_ids: [K + 1] the target's token (greedy, or coupled to a seed) before the drafts and
    after each; draft_ids: [K], a tree by their parents [K] (see `engine.tree`).
    Returns the places of the drafts that are accepted, in order, and the token that follows them.
    """
    drafted = {(parents[place], token): place for place, token in enumerate(draft_ids)}
    accepted: list[int] = []
    at = -1
    while (found := drafted.get((at, target_ids[at + 1]))) is not None:
        accepted.append(found)
        at = found
    return accepted, target_ids[at + 1]


def verify_rejection(
    target: torch.Tensor,
    draft_ids: Sequence[int],
    draft: torch.Tensor | None,
    generator: torch.Generator,
    vocabulary: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Speculative sampling (arXiv 2211.17192 section 2.3; arXiv 2302.01318 theorem 1).

    target: [K + 1, vocab] the target's distributions p; draft_ids: [K] tokens drawn from
    draft: [K, n] the drafter's distributions q, or None where it proposes without chance
    (q is 1 at the draft). vocabulary: [n] the target's ids of what q is over, None for all of them.
    A draft x is accepted with probability min(1, p(x) / q(x)); at the first rejection the token
    comes from norm(max(0, p - q)), after the last acceptance from p.
    Returns how many drafts are accepted and the token that follows them.
    """
    if not draft_ids:
        return 0, draw(target[0], generator)
    ids = torch.tensor(draft_ids, device=target.device).unsqueeze(1)
    proposed = torch.zeros_like(target[:-1])
    if draft is None:
        proposed.scatter_(1, ids, 1.0)
    elif vocabulary is None:
        proposed = draft
    else:
        proposed.index_add_(1, vocabulary, draft)
    p = target[:-1].gather(1, ids).squeeze(1)
    q = proposed.gather(1, ids).squeeze(1)
    uniform = torch.rand(p.shape, generator=generator, device=p.device)
    rejected = (uniform * q >= p).nonzero()
    if not len(rejected):
        return len(draft_ids), draw(target[-1], generator)
    accepted = int(rejected[0])
    return accepted, draw(_residual(target[accepted], proposed[accepted]), generator)


def _residual(target: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    residual = (target - proposed).clamp_min_(0.0)
    # p and q equal up to rounding: nothing is left over, and p is the answer.
    return residual if bool(residual.sum() > 0.0) else target
