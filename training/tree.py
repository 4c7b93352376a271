"""What drafting a tree instead of a chain could gain: an upper bound from measured ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["best_chain", "best_tree"]


def best_chain(ranks: Sequence[Sequence[float]], nodes: int) -> float:
    """Tokens a step of a chain of `nodes` drafts, the bonus token included (see `best_tree`)."""
    length, reached = 1.0, 1.0
    for depth in range(nodes):
        reached *= ranks[min(depth, len(ranks) - 1)][0]
        length += reached
    return length


def best_tree(ranks: Sequence[Sequence[float]], nodes: int, depth: int) -> float:
    """Tokens a step of the best fixed tree of so many drafted tokens and levels.

    ranks: at each level, the shares of first, second, ... choices that are the target's token when
    all levels above were right; the last level stands for deeper ones. A node is reached with the
    product along its path, so the best tree takes the likeliest nodes (EAGLE-2, arXiv 2406.16858,
    section 4.1, with fixed instead of current confidences).
    """
    length = 1.0
    waiting = [(-share, 1) for share in ranks[0]]
    heapq.heapify(waiting)
    for _ in range(nodes):
        if not waiting:
            break
        reached, level = heapq.heappop(waiting)
        length -= reached
        if level < depth:
            for share in ranks[min(level, len(ranks) - 1)]:
                heapq.heappush(waiting, (reached * share, level + 1))
    return length
