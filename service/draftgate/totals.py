"""What an engine says of a whole generation when it says nothing of single tokens and steps."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Totals"]


@dataclass(frozen=True)
class Totals:
    """Counts so far. None: the engine does not say; zero is a count."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    verify_steps: int | None = None
    derived: bool = False
    """Whether `accepted_tokens` and `verify_steps` follow from how many tokens each response
    brought. Otherwise the engine counted them."""
