"""Triton loads this file; the model itself is `draftgate.backend.preprocessing`."""

from __future__ import annotations

from draftgate.backend.preprocessing import TritonPythonModel

__all__ = ["TritonPythonModel"]
