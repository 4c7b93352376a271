"""Drafters: who proposes the tokens that the target verifies. A new one is a file and a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from draftgate.engine.config import EngineConfig
from draftgate.engine.drafters.base import Draft, Drafter, DraftQuery, Settled
from draftgate.engine.drafters.draft_model import DraftModelDrafter
from draftgate.engine.drafters.eagle import EagleDrafter
from draftgate.engine.drafters.eagle_head import EagleHead
from draftgate.engine.drafters.hybrid import HybridDrafter
from draftgate.engine.drafters.medusa import MedusaDrafter, MedusaHeads
from draftgate.engine.drafters.ngram import NgramDrafter
from draftgate.engine.model import Target
from draftgate.errors import invalid_argument

__all__ = [
    "DRAFTERS",
    "Draft",
    "DraftModelDrafter",
    "DraftQuery",
    "Drafter",
    "EagleDrafter",
    "EagleHead",
    "HybridDrafter",
    "MedusaDrafter",
    "MedusaHeads",
    "NgramDrafter",
    "Settled",
    "make_drafter",
]


def _ngram(config: EngineConfig, target: Target) -> NgramDrafter:
    return NgramDrafter(config.ngram_min, config.ngram_max)


def _eagle(config: EngineConfig, target: Target) -> Drafter:
    return EagleDrafter(EagleHead(_folder(config), target), config.draft_width)


def _hybrid(config: EngineConfig, target: Target) -> Drafter:
    return HybridDrafter(_ngram(config, target), _eagle(config, target))


def _draft_model(config: EngineConfig, target: Target) -> Drafter:
    return DraftModelDrafter(_folder(config), target)


def _medusa(config: EngineConfig, target: Target) -> Drafter:
    return MedusaDrafter(MedusaHeads(_folder(config), target), target)


def _folder(config: EngineConfig) -> Path:
    if not config.drafter_dir:
        raise invalid_argument(
            "drafter_dir", "", f"the folder of a drafter, which {config.drafter!r} needs"
        )
    return Path(config.drafter_dir)


DRAFTERS: Mapping[str, Callable[[EngineConfig, Target], Drafter]] = {
    "hybrid": _hybrid,
    "eagle": _eagle,
    "ngram": _ngram,
    "draft-model": _draft_model,
    "medusa": _medusa,
}
"""Every drafter by the name that the configuration gives it."""


def make_drafter(config: EngineConfig, target: Target) -> Drafter | None:
    """The configured drafter; None where the engine never speculates.

    Raises DraftgateError: INVALID_ARGUMENT for a name that is not in DRAFTERS, FAILED_PRECONDITION
    when the folder does not hold a drafter for this target.
    """
    if config.draft_len == 0 or config.drafter == "none":
        return None
    make = DRAFTERS.get(config.drafter)
    if make is None:
        raise invalid_argument("drafter", config.drafter, " or ".join((*DRAFTERS, "none")))
    return make(config, target)
