"""The choices of one request, shown one after the other though they come side by side."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateResponse, TokenChunk
from draftgate.cli.answer import Answer
from draftgate.cli.render import Renderer

__all__ = ["Choices"]


class Choices:
    """What one request brings. The first choice is shown as it comes, the next one from where the
    one before it has ended; a single one looks as if there were no others."""

    def __init__(self, renderer: Renderer, count: int) -> None:
        """To be made when the request is sent: times count from here."""
        self._renderer = renderer
        self._count = count
        self._sent_s = time.monotonic()
        self._choices: dict[int, _Choice] = {}
        """Those of which something came, by their index."""
        self._on_show = 0

    async def follow(self, events: AsyncGenerator[GenerateResponse, None]) -> None:
        """Show `events` until they end. What came is shown when they end in an error, too."""
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    self._take(event)
        finally:
            for _, choice in sorted(self._choices.items()):
                choice.show()
                self._renderer.end()

    def summaries(self) -> Iterator[str]:
        """The closing line of each choice that has ended."""
        for _, choice in sorted(self._choices.items()):
            if choice.answer.finished is not None:
                name = f"{choice.name} · " if choice.name else ""
                yield name + choice.answer.summary()

    def _take(self, event: GenerateResponse) -> None:
        if event.started.prompt_text:
            self._renderer.prompt(event.started.prompt_text)
        if event.index not in self._choices:
            name = f"choice {event.index + 1} of {self._count}" if self._count > 1 else ""
            self._choices[event.index] = _Choice(self._renderer, name, self._sent_s)
        self._choices[event.index].answer.take(event)
        while (choice := self._choices.get(self._on_show)) is not None:
            choice.show()
            if choice.answer.finished is None:
                return
            self._renderer.end()
            self._on_show += 1


class _Choice:
    """One of them. What it says waits until it is shown."""

    def __init__(self, renderer: Renderer, name: str, sent_s: float) -> None:
        self.name = name
        """Empty for the only one."""
        self.answer = Answer(self, sent_s)
        self._renderer = renderer
        self._waiting: list[TokenChunk] = []
        self._shown = False

    def show(self) -> None:
        """Show what came and what comes. Nothing is shown of one of which nothing came."""
        waiting, self._waiting = self._waiting, []
        if waiting and not self._shown:
            self._shown = True
            if self.name:
                self._renderer.heading(self.name)
        for chunk in waiting:
            self._renderer.write(chunk)

    def write(self, chunk: TokenChunk) -> None:
        self._waiting.append(chunk)

    def end(self) -> None:
        """Who shows several ends each when it is over."""
