"""Drafters: who proposes the tokens that the target verifies. A new one is a file and a line."""

from __future__ import annotations

from draftgate.engine.config import EngineConfig
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery
from draftgate.engine.drafters.ngram import NgramDrafter

__all__ = ["Draft", "DraftQuery", "Drafter", "NgramDrafter", "make_drafter"]


def make_drafter(config: EngineConfig) -> Drafter | None:
    """The configured drafter; None where the engine never speculates."""
    if config.draft_len == 0 or config.drafter == "none":
        return None
    return NgramDrafter(config.ngram_min, config.ngram_max)
