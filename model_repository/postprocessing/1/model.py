"""Triton loads this file; the model itself is `draftgate.backend.postprocessing`."""

from __future__ import annotations

from draftgate.backend.postprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
