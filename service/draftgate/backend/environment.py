"""What a Triton model learns from its process environment, which `tritonserver` hands down."""

from __future__ import annotations

import os
from pathlib import Path

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["ENGINE_SETTINGS", "MODEL_DIR", "model_dir"]

MODEL_DIR = "DRAFTGATE_MODEL_DIR"
"""The variable that names the checkpoint folder."""

ENGINE_SETTINGS = "DRAFTGATE_ENGINE"
"""The variable with the engine's settings, a JSON object; it may be absent."""


def model_dir() -> Path:
    """The checkpoint folder. Raises DraftgateError(FAILED_PRECONDITION) if none is configured."""
    value = os.environ.get(MODEL_DIR, "")
    if not value:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"{MODEL_DIR} is not set: name the checkpoint folder"
        )
    return Path(value)
