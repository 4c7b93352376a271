"""Drafting with Medusa heads: small heads that read the target's last hidden state.

Medusa-1 (arXiv 2401.10774, section 2.1), one token a head, no tree. The hidden state of position i
gives the target's own token i + 1; head k, counted from 1, foretells token i + 1 + k from it
without knowing the tokens between. So there is no cache, and all heads read one state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftgate.contract import DraftSource
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.chain import Chain, drafting, lengthen
from draftgate.engine.drafters.fit import check_sizes, check_vocabulary, unfit
from draftgate.engine.linear import Linear, padded
from draftgate.engine.model import Target
from draftgate.engine.weights import CheckpointReader
from draftgate.jsonfile import read_object

__all__ = ["MedusaDrafter", "MedusaHeads"]

_PREFIX = "medusa_head."
"""What the names of the tensors begin with in some folders."""


class MedusaHeads:
    """The heads' weights, from a Hugging Face folder.

    `config.json` has medusa_num_heads, medusa_num_layers, hidden_size and vocab_size; the tensors
    are `<head>.<layer>.linear.weight` and `.bias` of the residual blocks and
    `<head>.<medusa_num_layers>.weight` of the output, heads and layers counted from 0.
    """

    def __init__(self, folder: Path, target: Target) -> None:
        """Raises DraftgateError(FAILED_PRECONDITION) when they are not heads for this target."""
        config = read_object(folder / "config.json")
        heads, layers = (
            _count(folder, config.get(name), name, least)
            for name, least in (("medusa_num_heads", 1), ("medusa_num_layers", 0))
        )
        shape = target.config.shape
        check_sizes(
            folder,
            {
                "hidden_size": (config.get("hidden_size"), shape.hidden_size),
                "vocab_size": (config.get("vocab_size"), shape.vocab_size),
            },
        )
        check_vocabulary(folder, target)
        reader = CheckpointReader(folder, prepared=False)
        prefix = _PREFIX if f"{_PREFIX}0.{layers}.weight" in reader else ""

        def placed(name: str, *extents: int) -> torch.Tensor:
            weight = reader.weight(prefix + name, extents)
            return weight.to(target.dtype).to(target.device).contiguous()

        width = shape.hidden_size
        self._heads = [
            _Head(
                blocks=tuple(
                    Linear(
                        placed(f"{head}.{layer}.linear.weight", width, width),
                        placed(f"{head}.{layer}.linear.bias", width),
                    )
                    for layer in range(layers)
                ),
                output=Linear(placed(f"{head}.{layers}.weight", shape.vocab_size, width)),
            )
            for head in range(heads)
        ]

    def __len__(self) -> int:
        return len(self._heads)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of a head, counted from 0, from normed states [rows, hidden]."""
        x = padded(hidden)
        for block in self._heads[head].blocks:
            x = x + block.silu(x)
        return self._heads[head].output(x)[: len(hidden)]


@dataclass(frozen=True)
class _Head:
    blocks: tuple[Linear, ...]
    output: Linear


@dataclass(frozen=True)
class _Row:
    """Where a row stands."""

    synced_upto: int
    hidden: torch.Tensor
    """[hidden]: the target's last layer's output at the position before the newest token's."""


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads."""

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self._heads = heads
        self._target = target
        self._rows: dict[int, _Row] = {}
        self._generator = torch.Generator(device=target.device)
        self._generator.seed()
        self.taps = (target.config.shape.layers,)

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft]:
        chains = [
            Chain(query, min(query.count, len(self._heads)) if self._ready(query) else 0)
            for query in queries
        ]
        active = drafting(chains)
        if active:
            self._draft(active)
        return [chain.draft(DraftSource.MEDUSA) for chain in chains]

    def observe(self, rows: Sequence[Settled], features: torch.Tensor | None) -> None:
        assert features is not None
        newest = [row.packed[row.upto - 2 - row.start] for row in rows]
        chosen = features.index_select(0, torch.tensor(newest, device=features.device))
        for row, hidden in zip(rows, chosen, strict=True):
            self._rows[row.row_id] = _Row(row.upto, hidden)

    def reset(self, row_id: int) -> None:
        self._rows.pop(row_id, None)

    def synced_upto(self, row_id: int) -> int:
        row = self._rows.get(row_id)
        return row.synced_upto if row is not None else 0

    def _ready(self, query: DraftQuery) -> bool:
        return self.synced_upto(query.row_id) == len(query.tokens)

    def _draft(self, active: list[Chain]) -> None:
        """Add a token of each head to the chains, the longest first."""
        rows = [self._rows[chain.query.row_id].hidden for chain in active]
        hidden = self._target.normed(torch.stack(rows))
        for head in range(active[0].count):
            active = [chain for chain in active if chain.count > head]
            logits = self._heads.logits(head, hidden[: len(active)])
            lengthen(active, logits, self._generator)


def _count(folder: Path, value: object, name: str, least: int) -> int:
    if type(value) is not int or value < least:
        raise unfit(f"{folder}: {name} is {value}, not an integer of at least {least}")
    return value
