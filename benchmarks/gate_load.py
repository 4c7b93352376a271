"""Loads on a running service, and what comes of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest, TokenChunk
from draftgate.cli.client import GatewayClient

__all__ = ["Job", "Window", "closed_loop", "settle"]

_TIMEOUT_S = 300.0

Job = tuple[Sequence[int], int]
"""A prompt's token ids, and the most tokens of its answer."""


@dataclass
class Window:
    """What all streams together were sent in some time."""

    streams: int
    seconds: float
    tokens: int = 0
    chunks: int = 0
    """Of all streams: a step's tokens of one row each."""
    drafted: int = 0
    """Tokens that were drafted for these chunks."""
    gaps_ms: list[float] = field(default_factory=list)
    """Between two chunks of one stream."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_draft_len(self) -> float:
        """Drafted tokens a chunk."""
        return self.drafted / self.chunks if self.chunks else 0.0

    def add(self, other: Window) -> None:
        """Count another window's too."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.chunks += other.chunks
        self.drafted += other.drafted
        self.gaps_ms += other.gaps_ms


async def closed_loop(
    client: GatewayClient, jobs: Sequence[Job], streams: int, window_s: float | None = None
) -> Window:
    """Keep `streams` generations running, each followed by the next, greedy, and count what comes.

    It ends when a stream finds no job left: then all cases have done the same work, up to what the
    other streams have begun. window_s: or after so long, and the jobs begin again when they are
    used up.
    """
    window = Window(streams, 0.0)
    queue = iter(jobs) if window_s is None else itertools.cycle(jobs)
    tasks = [asyncio.create_task(_stream(client, queue, window)) for _ in range(streams)]
    begun_s = time.perf_counter()
    try:
        done, _ = await asyncio.wait(tasks, timeout=window_s, return_when=asyncio.FIRST_COMPLETED)
        window.seconds = time.perf_counter() - begun_s
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _idle(client)
    return window


async def settle(client: GatewayClient, jobs: Sequence[Job], streams: int, steps: int) -> None:
    """Keep so many generations running until the engine has run so many steps."""
    begun = await client.gate_state(timeout_s=_TIMEOUT_S)
    running = asyncio.create_task(closed_loop(client, jobs, streams, window_s=_TIMEOUT_S))
    try:
        while (await client.gate_state(timeout_s=_TIMEOUT_S)).steps - begun.steps < steps:
            await asyncio.wait([running], timeout=0.5)
            if running.done():
                running.result()
    finally:
        running.cancel()
        await asyncio.wait([running])


async def _idle(client: GatewayClient) -> None:
    """Wait until the engine has dropped what was cancelled: two engines that compute at once slow
    each other down many times over."""
    while True:
        state = await client.gate_state(timeout_s=_TIMEOUT_S)
        if not state.running_rows + state.waiting_rows:
            return
        await asyncio.sleep(0.05)


async def _stream(client: GatewayClient, jobs: Iterator[Job], window: Window) -> None:
    for ids, max_tokens in jobs:
        request = GenerateRequest(max_tokens=max_tokens)
        request.input_ids.extend(ids)
        request.sampling.temperature = 0.0
        last_s: float | None = None
        async with aclosing(client.generate(request, timeout_s=_TIMEOUT_S)) as events:
            async for event in events:
                if not event.HasField("tokens"):
                    continue
                now_s = time.perf_counter()
                _count(window, event.tokens)
                if last_s is not None:
                    window.gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s


def _count(window: Window, chunk: TokenChunk) -> None:
    window.chunks += 1
    window.tokens += len(chunk.tokens)
    window.drafted += sum(step.drafted for step in chunk.verify_steps)
