"""Fixtures that every area shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftgate.checkpoint import SilentProgress, ensure_checkpoint, packaged_source

_CACHE = Path(__file__).parent.parent / "build" / "test-checkpoint"


@pytest.fixture(scope="session")
def checkpoint_dir() -> Path:
    """The packaged model prepared in FP8, kept between runs."""
    return ensure_checkpoint(packaged_source(), _CACHE / "smollm2-fp8", progress=SilentProgress())
