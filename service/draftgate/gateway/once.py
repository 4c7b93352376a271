"""A generation as one whole, for callers who do not want a stream."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from draftgate.gateway.events import Event, Finished, Started, Token

__all__ = ["Choice", "collect"]


@dataclass(frozen=True)
class Choice:
    """One whole generation."""

    started: Started
    text: str
    tokens: tuple[Token, ...]
    finished: Finished


async def collect(events: AsyncIterable[Event]) -> list[Choice]:
    """The choices that the events tell of, by their index.

    Raises what iterating over the events raises: a part of a generation is not returned.
    """
    parts: dict[int, _Parts] = {}
    choices: dict[int, Choice] = {}
    async for event in events:
        if isinstance(event, Started):
            parts[event.index] = _Parts(event)
        elif isinstance(event, Finished):
            choices[event.index] = parts.pop(event.index).choice(event)
        else:
            parts[event.index].texts.append(event.text)
            parts[event.index].tokens.extend(event.tokens)
    return [choices[index] for index in sorted(choices)]


@dataclass
class _Parts:
    started: Started
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def choice(self, finished: Finished) -> Choice:
        return Choice(self.started, "".join(self.texts), tuple(self.tokens), finished)
