"""What lies in the repository that Draftgate runs from, if it runs from one."""

from __future__ import annotations

from pathlib import Path

import draftgate

__all__ = ["checkout", "packaged_checkpoint", "shipped_drafter"]

_MODEL = "smollm2-135m-instruct-fp8"
_DRAFTER = "smollm2-135m-instruct-eagle3"


def checkout() -> Path:
    """Where the repository is."""
    assert draftgate.__file__ is not None
    return Path(draftgate.__file__).parents[2]


def packaged_checkpoint(models: Path) -> Path:
    """Where the packaged model is prepared, in the folder of models."""
    return models / _MODEL


def shipped_drafter() -> Path:
    """The drafter that is shipped for the packaged model."""
    return checkout() / "drafters" / _DRAFTER
