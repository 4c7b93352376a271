"""The gate that an engine's configuration asks for."""

from __future__ import annotations

from draftgate.engine.config import EngineConfig
from draftgate.speculation import CostTable, Gate, Mode, Policy

__all__ = ["draft_lens", "make_gate"]

_LENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Draft lengths that a gate chooses from: the longer, the less one more changes."""


def draft_lens(longest: int) -> tuple[int, ...]:
    """What may be chosen where the longest draft is so long."""
    return (*(draft_len for draft_len in _LENS if draft_len < longest), longest)


def make_gate(config: EngineConfig, costs: CostTable | None) -> Gate:
    """costs: what a gate that is to decide by load needs; until it has them it drafts all it may."""
    policy = Policy()
    if config.gate == "fixed" or config.draft_len == 0:
        policy = Policy(mode=Mode.FIXED, draft_len=config.draft_len)
    return Gate(draft_lens(config.draft_len), costs, policy)
