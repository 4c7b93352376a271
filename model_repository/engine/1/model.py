"""Triton loads this file; the model itself is `draftgate.backend.engine`."""

from __future__ import annotations

from draftgate.backend.engine import TritonPythonModel

__all__ = ["TritonPythonModel"]
