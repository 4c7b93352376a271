"""Drafts that branch: a tree of tokens, told by the parent of each.

`parents[i]` is the place of the token that token i follows, -1 where that is the row's newest
token. Parents come before their children, so a chain is -1, 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["chain_parents", "depths", "paths"]


def chain_parents(count: int) -> range:
    """The parents of `count` tokens that follow one another."""
    return range(-1, count - 1)


def depths(parents: Sequence[int]) -> list[int]:
    """How many tokens lead to each, itself included: 1 where the parent is the newest token."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The places of the tokens that lead to each, itself last."""
    found: list[list[int]] = []
    for place, parent in enumerate(parents):
        found.append([place] if parent < 0 else [*found[parent], place])
    return found
