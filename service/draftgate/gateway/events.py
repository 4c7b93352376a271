"""What a generation tells its caller, free of wire formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftgate.telemetry.report import GenerationReport
from draftgate.upstream.types import PromptReport, TokenAlternative, VerifyStep

__all__ = ["Event", "Finished", "Started", "Token", "Tokens"]


@dataclass(frozen=True)
class Started:
    """The prompt has been read and the first step is done."""

    request_id: str
    model: str
    prompt: PromptReport
    prompt_text: str | None = None
    """The prompt's own text, if asked for."""
    index: int = 0
    """Which of the choices this is about; so in every event."""


class Token(NamedTuple):
    """One emitted token."""

    id: int
    drafted: bool
    """Whether it was drafted and accepted; else it is the target's own."""
    text: str | None = None
    """The text it completed, if asked for."""
    logprob: float | None = None
    alternatives: tuple[TokenAlternative, ...] = ()


@dataclass(slots=True)  # Not frozen: that would make the commonest event dearer.
class Tokens:
    """New tokens."""

    text: str
    tokens: tuple[Token, ...]
    verify_steps: tuple[VerifyStep, ...]
    """Steps that drafted something."""
    draft_texts: tuple[tuple[str, ...], ...]
    """For each verify step the text of its drafts; empty unless drafts and text were asked for."""
    gate_reason: int
    batch_rows: int
    index: int = 0


@dataclass(frozen=True)
class Finished:
    """The last event, also of a generation that failed."""

    finish_reason: str
    """A contract.FinishReason; empty if the generation did not come to its own end."""
    report: GenerationReport
    stop_string: str | None = None
    """The stop string that ended it."""
    end_token: int | None = None
    """The stop token or end-of-sequence token that ended it, if it was emitted."""
    index: int = 0


Event = Started | Tokens | Finished
