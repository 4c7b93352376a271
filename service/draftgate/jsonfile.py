"""Reading one JSON object from a file of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["read_object"]


def read_object(path: Path) -> dict[str, Any]:
    """Raises DraftgateError(FAILED_PRECONDITION) when there is no such object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid JSON"
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"cannot read {path}: {reason}"
        ) from error
    if not isinstance(found, dict):
        raise DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{path} is not a JSON object")
    return found
