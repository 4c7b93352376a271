"""Triton loads this file; the model itself is `draftgate.backend.postprocessing`."""

from __future__ import annotations

import os
import sys

# Triton's stub runs an isolated interpreter, which ignores PYTHONPATH: the server's environment
# says where the packages are when they are not installed for that interpreter.
sys.path[:0] = filter(None, os.environ.get("DRAFTGATE_PYTHONPATH", "").split(os.pathsep))

from draftgate.backend.postprocessing import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
