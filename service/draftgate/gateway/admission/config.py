"""How much is let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

__all__ = ["AdmissionConfig"]


@dataclass(frozen=True)
class AdmissionConfig:
    """Limits of the server as a whole; those of a tenant are its TenantLimits."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Most generations that run at once; None takes the rows of the engine."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Most generations that wait for one to end; None is four for each that may run."""
    max_wait_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Longest wait: who would wait or has waited longer is refused."""
    interactive_per_batch: Annotated[int, Field(ge=1, le=1000)] = 8
    """Interactive starts to each batch start while both wait."""
    kv_overcommit: Annotated[float, Field(ge=0.1, le=100)] = 2.0
    """How many times the engine's KV cache is promised: few generations reach their max_tokens, and
    the engine makes rows wait when too many do."""
