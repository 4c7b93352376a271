"""Drafters: who proposes the tokens that the target verifies. A new one is a file and a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from draftgate.engine.config import EngineConfig
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery
from draftgate.engine.drafters.ngram import NgramDrafter
from draftgate.errors import invalid_argument

__all__ = ["DRAFTERS", "Draft", "DraftQuery", "Drafter", "NgramDrafter", "make_drafter"]


DRAFTERS: Mapping[str, Callable[[EngineConfig], Drafter]] = {
    "ngram": lambda config: NgramDrafter(config.ngram_min, config.ngram_max),
}
"""Every drafter by the name that the configuration gives it."""


def make_drafter(config: EngineConfig) -> Drafter | None:
    """The configured drafter; None where the engine never speculates.

    Raises DraftgateError(INVALID_ARGUMENT) for a name that is not in DRAFTERS.
    """
    if config.draft_len == 0 or config.drafter == "none":
        return None
    make = DRAFTERS.get(config.drafter)
    if make is None:
        raise invalid_argument("drafter", config.drafter, " or ".join((*DRAFTERS, "none")))
    return make(config)
