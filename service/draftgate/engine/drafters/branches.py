"""Drafting a tree: the tokens that are likeliest to be reached, whatever their depth.

The drafter's likelihood of a token times those of the tokens that lead to it estimates how often a
step gets that far (EAGLE-2, arXiv 2406.16858, section 4.1), and a token can be no likelier than the
one it follows. So the best tree of K tokens is the K likeliest found, and a level is worth reading
only as long as something of it is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftgate.contract import DraftSource
from draftgate.engine.drafters.base import Draft, DraftQuery
from draftgate.engine.tree import chain_parents

__all__ = ["Branches", "Node"]


@dataclass(frozen=True)
class Node:
    """A token that may be drafted."""

    token: int
    """The target's id."""
    parent: int
    """Its parent's number among the nodes, -1 for the row's newest token."""
    depth: int
    """1 where the parent is the newest token."""
    log_likelihood: float
    """Of reaching it, as the drafter sees it."""


@dataclass
class Branches:
    """The tokens found for one query so far, level by level."""

    query: DraftQuery
    count: int
    """How many tokens to draft at most."""
    nodes: list[Node] = field(default_factory=list)
    """In the order they were found: parents before children."""
    read: list[int] = field(default_factory=list)
    """The nodes whose children are found or looked for, in order."""
    _level: int = 0
    """The first node of the newest level."""

    def add_level(
        self,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        logs: Sequence[Sequence[float]],
    ) -> None:
        """Add the likeliest children of each of `parents`, and their log-likelihoods after it."""
        first = len(self.nodes)
        for parent, children, children_logs in zip(parents, tokens, logs, strict=True):
            before, depth = 0.0, 1
            if parent >= 0:
                before, depth = self.nodes[parent].log_likelihood, self.nodes[parent].depth + 1
            for token, log in zip(children, children_logs, strict=True):
                if log > float("-inf"):
                    self.nodes.append(Node(token, parent, depth, before + log))
        self._level = first

    def next_level(self, width: int, room: int) -> list[int]:
        """The nodes to look for children of next, at most `width`, and with those before at most
        `room`; none when that could change nothing."""
        best = self._best()
        weakest = self.nodes[best[-1]].log_likelihood if len(best) == self.count else float("-inf")
        worth = [
            number
            for number in best
            if number >= self._level and self.nodes[number].log_likelihood > weakest
        ]
        chosen = worth[: min(width, room - len(self.read))]
        self.read.extend(chosen)
        return chosen

    def read_tree(self) -> list[int]:
        """The nodes of `read` as a tree of their own (see `engine.tree`)."""
        place = {number: place for place, number in enumerate(self.read)}
        return [place.get(self.nodes[number].parent, -1) for number in self.read]

    def draft(self, source: DraftSource) -> Draft:
        """The likeliest of the nodes, the likeliest first: the first of them are what fewer tokens
        would have been."""
        chosen = self._best()
        place = {number: place for place, number in enumerate(chosen)}
        parents = tuple(place.get(self.nodes[number].parent, -1) for number in chosen)
        return Draft(
            token_ids=tuple(self.nodes[number].token for number in chosen),
            source=source,
            tree=() if parents == tuple(chain_parents(len(chosen))) else parents,
        )

    def _best(self) -> list[int]:
        """The `count` likeliest nodes, the likeliest first, a parent before its children."""
        order = sorted(range(len(self.nodes)), key=lambda n: (-self.nodes[n].log_likelihood, n))
        return order[: self.count]
