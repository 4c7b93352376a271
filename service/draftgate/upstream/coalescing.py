"""Several chunks of a generation made one, while the gateway has much to do.

What a message costs hardly depends on how many tokens it carries. So while many chunks come, those
of a generation wait for each other: never long, and never the first or the last one. All that wait
go on at the same moment, since what is sent together costs less than what is sent one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field

from draftgate.contract import DraftSource
from draftgate.upstream.types import Chunk, VerifyStep

__all__ = ["Coalescing", "CoalescingConfig", "follows", "merged"]

T = TypeVar("T")

_PLAIN_STEP = VerifyStep(drafted=0, accepted=0, source=DraftSource.NONE)

_WINDOW_S = 0.25
"""Over so long it is counted how many chunks come."""


@dataclass(frozen=True)
class CoalescingConfig:
    """When chunks wait for each other."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    busy_chunks_per_s: Annotated[float, Field(ge=0)] = 4000.0
    """From so many chunks a second on, of all generations together: about half of what one process
    can hand on one by one. 0 is always."""
    max_delay_ms: Annotated[float, Field(ge=0, le=1000)] = 100.0
    """Longest wait; 0 hands every chunk on alone."""


class Coalescing:
    """What the generations of a gateway share: how busy it is, and the beat at which they go on.

    Needs a running event loop.
    """

    def __init__(self, config: CoalescingConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._busy = not config.busy_chunks_per_s
        self._chunks = 0
        self._since_s = self._loop.time()
        self._waiting: list[Callable[[], None]] = []

    def count(self) -> None:
        """A chunk came."""
        self._chunks += 1

    @property
    def busy(self) -> bool:
        """Whether so many come that they had better be made fewer."""
        now_s = self._loop.time()
        passed_s = now_s - self._since_s
        if passed_s >= _WINDOW_S:
            self._busy = self._chunks >= self._config.busy_chunks_per_s * passed_s
            self._chunks = 0
            self._since_s = now_s
        return self._busy

    def at_beat(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` at the next beat, at most `max_delay_ms` from now."""
        if not self._waiting:
            self._loop.call_later(self._config.max_delay_ms / 1000, self._beat)
        self._waiting.append(go_on)

    def _beat(self) -> None:
        waiting, self._waiting = self._waiting, []
        for go_on in waiting:
            go_on()


def follows(chunk: Chunk, successor: Chunk) -> bool:
    """Whether the two can be made one.

    The last chunk stays alone: what it says is about the generation, not about its tokens.
    """
    return (
        not (chunk.finish_reason or successor.finish_reason)
        and bool(chunk.logprobs) == bool(successor.logprobs)
        and bool(chunk.alternatives) == bool(successor.alternatives)
    )


def merged(chunks: Sequence[Chunk]) -> Chunk:
    """One chunk that says what these say, each of which `follows` the one before."""
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first
    return Chunk(
        index=first.index,
        text="".join([chunk.text for chunk in chunks]),
        token_ids=_joined([chunk.token_ids for chunk in chunks]),
        steps=_joined([_every_step(chunk) for chunk in chunks]),
        gate_reason=last.gate_reason,
        batch_rows=last.batch_rows,
        finish_reason="",
        logprobs=_joined([chunk.logprobs for chunk in chunks]),
        alternatives=_joined([chunk.alternatives for chunk in chunks]),
        prompt=first.prompt,
        totals=last.totals,
        size_bytes=sum(chunk.size_bytes for chunk in chunks),
    )


def _every_step(chunk: Chunk) -> tuple[VerifyStep, ...]:
    """Its steps, and one that drafted nothing for each token that belongs to none of them: else
    the steps behind them would be taken for theirs."""
    theirs = sum(step.accepted + 1 for step in chunk.steps)
    return chunk.steps + (_PLAIN_STEP,) * (len(chunk.token_ids) - theirs)


def _joined(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(chain.from_iterable(parts))
