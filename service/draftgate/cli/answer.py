"""Follows one generation: shows it as it comes, measures it, and sums it up in a line."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from draftgate._pb.draftgate.v1.generation_pb2 import (
    FinishReason,
    GenerateResponse,
    GenerationFinished,
    TokenChunk,
)

__all__ = ["Answer", "Shows"]


class Shows(Protocol):
    """What shows an answer, such as a `Renderer`."""

    def write(self, chunk: TokenChunk) -> None:
        """Show the next chunk."""

    def end(self) -> None:
        """There are no more."""


class Answer:
    """One generation as the user sees it."""

    def __init__(self, shows: Shows, sent_s: float = 0.0) -> None:
        """sent_s: of `time.monotonic`, when its request was sent; `follow` knows by itself."""
        self._shows = shows
        self._parts: list[str] = []
        self._first_tokens = self._output_tokens = self._prompt_tokens = 0
        self._sent_s = sent_s
        self._first_s = self._last_s = 0.0
        self.finished: GenerationFinished | None = None
        """The last event; None when the stream broke off before it."""

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the text so far."""
        return self._prompt_tokens + self._output_tokens

    async def follow(self, events: AsyncGenerator[GenerateResponse, None]) -> None:
        """Show `events` until they end. What was shown is kept when they end in an error."""
        self._sent_s = time.monotonic()
        try:
            async with aclosing(events) as stream:
                async for event in stream:
                    self.take(event)
        finally:
            self._shows.end()

    def take(self, event: GenerateResponse) -> None:
        """Show one event; for who follows several generations at once."""
        match event.WhichOneof("event"):
            case "started":
                self._prompt_tokens = event.started.prompt_tokens
            case "tokens":
                self._take(event.tokens)
            case "finished":
                self.finished = event.finished

    def summary(self) -> str:
        """The closing line: tokens, TTFT, tokens/s, verify steps, acceptance rate and length.

        TTFT runs from sending the request to its first token; tokens/s is over the tokens after
        the first response, so it is the speed of decoding alone.
        """
        finished = self.finished or GenerationFinished()
        tokens = self._output_tokens
        parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
        if self._first_tokens:
            parts.append(f"TTFT {(self._first_s - self._sent_s) * 1000:.0f} ms")
        decode_s = self._last_s - self._first_s
        if tokens > self._first_tokens and decode_s > 0:
            parts.append(f"{(tokens - self._first_tokens) / decode_s:.1f} tokens/s")
        parts += _speculation(finished)
        reason = FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower()
        parts.append(f"ended by {reason.replace('_', ' ')}")
        return " · ".join(parts)

    def _take(self, chunk: TokenChunk) -> None:
        now_s = time.monotonic()
        if not self._first_tokens:
            self._first_tokens = len(chunk.tokens)
            self._first_s = now_s
        self._last_s = now_s
        self._output_tokens += len(chunk.tokens)
        self._parts.append(chunk.text)
        self._shows.write(chunk)


def _speculation(finished: GenerationFinished) -> list[str]:
    counts = finished.speculation
    if not counts.verify_steps:
        return ["no verify steps"]
    parts = [f"{counts.verify_steps} verify step{'' if counts.verify_steps == 1 else 's'}"]
    if counts.HasField("acceptance_rate"):
        parts.append(
            f"acceptance {counts.acceptance_rate:.0%}"
            f" ({counts.accepted_tokens}/{counts.drafted_tokens})"
        )
    if counts.HasField("mean_acceptance_length"):
        parts.append(f"acceptance length {counts.mean_acceptance_length:.2f}")
    return parts
