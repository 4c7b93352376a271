"""What every drafter does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgate.contract import DraftSource
from draftgate.engine.kv_cache import KVShape, KVStore
from draftgate.engine.sampler import RowSampler
from draftgate.engine.tree import chain_parents

__all__ = ["Draft", "DraftQuery", "Drafter", "Settled"]


@dataclass(frozen=True)
class DraftQuery:
    """A row that may be drafted for."""

    row_id: int
    """Names the row as long as it lives, wherever it lies in the batch."""
    slot: int
    """Where it lies in the KV cache now; there is room for `Drafter.places` more positions."""
    tokens: Sequence[int]
    """All its tokens so far, prompt and output."""
    count: int
    """Most tokens to draft, at least 1."""
    sampler: RowSampler
    """How the row picks tokens."""


@dataclass(frozen=True)
class Draft:
    """What was drafted for a row."""

    token_ids: tuple[int, ...] = ()
    """The drafted tokens, at most as many as asked for; may be none."""
    source: DraftSource = DraftSource.NONE
    """Who drafted them."""
    tree: tuple[int, ...] = ()
    """The place of the token that each follows where they branch, the newest token's being -1,
    parents before their children; empty: one follows the other. A row that draws by chance under
    rejection sampling is drafted no tree."""
    probabilities: torch.Tensor | None = None
    """The distributions they were drawn from, [tokens, n] in fp32; None: not by chance."""
    vocabulary: torch.Tensor | None = None
    """[n] int64: the target's ids of those n tokens; None: n is the target's whole vocabulary."""

    @property
    def parents(self) -> Sequence[int]:
        """The tree, or the chain in the same terms (see `engine.tree`)."""
        return self.tree or chain_parents(len(self.token_ids))


@dataclass(frozen=True)
class Settled:
    """A row whose tokens went through the target, with what became of them."""

    row_id: int
    slot: int
    tokens: Sequence[int]
    """All its tokens now, the target's own included."""
    start: int
    """Position of the first token it had in the pass."""
    computed: int
    """Positions before it are the target's for good; from `start` on they have features."""
    packed: Sequence[int]
    """Where in the pass, counted in tokens, the positions from `start` to `computed` - 1 were."""
    draft: Draft
    """What was verified for it; empty where nothing was drafted."""

    @property
    def accepted(self) -> int:
        """How many of the drafted tokens were accepted and emitted."""
        return self.computed - self.start - 1 if self.draft.token_ids else 0

    @property
    def upto(self) -> int:
        """How many of the tokens are settled: of a prompt under way, what is computed."""
        return min(self.computed + 1, len(self.tokens))


class Drafter(ABC):
    """Proposes tokens for many rows at once and follows what became of them."""

    taps: tuple[int, ...] = ()
    """The layers of the target whose inputs `observe` needs (see `Target.forward`)."""

    kv_shape: KVShape | None = None
    """What its own model keeps for a position; None: it has no KV cache."""

    def attach(self, store: KVStore) -> None:
        """Take the store for `kv_shape`. Its slots are the target's: rows move in both at once."""
        raise NotImplementedError

    def places(self, count: int) -> int:
        """Positions beyond a row's tokens that drafting `count` tokens may write in the store, at
        least `count`."""
        return count

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        """One draft for each query, in order. What a row lacks is caught up with first."""

    def shadow(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        """What it would draft for rows that are not going to verify anything, where to know that
        takes no model's time: to be compared with what the target emits. Else empty drafts."""
        return [Draft()] * len(queries)

    @abstractmethod
    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        """A pass of the target is verified. features: [tokens, taps * hidden] of that pass."""

    @abstractmethod
    def reset(self, row_id: int) -> None:
        """Forget the row: it has left, or will be observed from its start again."""

    @abstractmethod
    def synced_upto(self, row_id: int) -> int:
        """How many of the row's tokens the drafter has taken in."""
