"""Draftgate: LLM serving with speculative decoding that knows when to stop speculating."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
