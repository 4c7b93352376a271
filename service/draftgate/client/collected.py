"""What has come of a generation so far; it stays when the generation fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draftgate.client.types import (
    Choice,
    Completion,
    Event,
    Finished,
    Started,
    Token,
    Tokens,
    Usage,
)

__all__ = ["Collected"]


@dataclass
class _Parts:
    started: Started | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None


class Collected:
    """Keeps what the events tell."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}

    @property
    def choices(self) -> tuple[Choice, ...]:
        """As much of each choice as has come, by their index; empty until something has."""
        return tuple(
            Choice(index, "".join(each.texts), tuple(each.tokens), each.started, each.finished)
            for index, each in sorted(self._parts.items())
        )

    @property
    def text_so_far(self) -> str:
        """The text of the first choice."""
        return "".join(self._parts[0].texts) if 0 in self._parts else ""

    @property
    def finished(self) -> Finished | None:
        """How the first choice ended; None until it has."""
        return self._parts[0].finished if 0 in self._parts else None

    def _take(self, event: Event) -> None:
        parts = self._parts.setdefault(event.index, _Parts())
        if isinstance(event, Tokens):
            parts.texts.append(event.text)
            parts.tokens.extend(event.tokens)
        elif isinstance(event, Started):
            parts.started = event
        else:
            parts.finished = event

    def _completion(self) -> Completion:
        choices = self.choices
        ends = [each.finished.usage for each in choices if each.finished]
        return Completion(
            choices,
            Usage(
                _sum(end.prompt_tokens for end in ends),
                _sum(end.output_tokens for end in ends),
                _sum(end.cached_tokens for end in ends),
            ),
        )


def _sum(counts: Iterable[int | None]) -> int | None:
    found = list(counts)
    known = [each for each in found if each is not None]
    return sum(known) if len(known) == len(found) else None
