"""Whether a drafter's folder fits the target: refused at load, with the two values that differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from draftgate.checkpoint import vocabulary_digest
from draftgate.engine.model import Target
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["check_sizes", "check_vocabulary", "unfit"]


def check_sizes(folder: Path, sizes: Mapping[str, tuple[object, int]]) -> None:
    """sizes: by name, the drafter's value and the target's.

    Raises DraftgateError(FAILED_PRECONDITION) for the first two that differ.
    """
    for name, (found, needed) in sizes.items():
        if found != needed:
            raise unfit(f"{folder}: the drafter's {name} is {found}, the target's is {needed}")


def check_vocabulary(folder: Path, target: Target) -> None:
    """Compare the tokenizers, where both folders tell theirs.

    Raises DraftgateError(FAILED_PRECONDITION) when they differ.
    """
    made_for = vocabulary_digest(folder)
    has = vocabulary_digest(target.config.folder)
    if made_for and has and made_for != has:
        raise unfit(
            f"{folder}: the drafter was made for the tokenizer {made_for[:12]}, "
            f"the target's is {has[:12]}"
        )


def unfit(message: str) -> DraftgateError:
    """The error for a folder that holds no drafter, or none for this target."""
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, message)
