"""A closed loop of streams on a running service: what comes in a window of time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from draftgate._pb.draftgate.v1.gate_pb2 import GatePolicy, GateState
from draftgate._pb.draftgate.v1.generation_pb2 import GenerateRequest, TokenChunk
from draftgate.cli.client import GatewayClient

__all__ = ["Window", "closed_loop"]

_TIMEOUT_S = 300.0


@dataclass
class Window:
    """What all streams together were sent in a window of time."""

    streams: int
    seconds: float
    tokens: int = 0
    steps: int = 0
    """Of the engine."""
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
        self.steps += other.steps
        self.chunks += other.chunks
        self.drafted += other.drafted
        self.gaps_ms += other.gaps_ms


async def closed_loop(
    client: GatewayClient,
    policy: GatePolicy | None,
    prompts: Sequence[Sequence[int]],
    streams: int,
    *,
    settle_s: float,
    window_s: float,
    max_tokens: int,
    settle_steps: int = 0,
) -> Window:
    """Keep `streams` generations running, each followed by another, greedy; count what comes in
    `window_s` seconds after `settle_s` and after `settle_steps` steps of the engine.

    policy: what the gate is told before; None leaves it. prompts: token ids, taken in turn.
    """
    if policy is not None:
        await client.set_gate_policy(policy, save=False, timeout_s=_TIMEOUT_S)
    begun = await _state(client)
    counting = _Counting()
    queue = itertools.cycle(prompts)
    tasks = [
        asyncio.create_task(_stream(client, queue, max_tokens, counting)) for _ in range(streams)
    ]
    try:
        await _over(tasks, settle_s)
        while settle_steps and (await _state(client)).steps - begun.steps < settle_steps:
            await _over(tasks, 0.5)
        before = await _state(client)
        window = Window(streams, 0.0)
        began_s = time.perf_counter()
        counting.window = window
        await _over(tasks, window_s)
        counting.window = None
        window.seconds = time.perf_counter() - began_s
        window.steps = (await _state(client)).steps - before.steps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return window


class _Counting:
    """Where the streams put what they get; nowhere outside of the window."""

    window: Window | None = None


async def _over(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let the streams run. Raises what one of them raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _stream(
    client: GatewayClient,
    prompts: itertools.cycle[Sequence[int]],
    max_tokens: int,
    counting: _Counting,
) -> None:
    while True:
        request = GenerateRequest(max_tokens=max_tokens)
        request.input_ids.extend(next(prompts))
        request.sampling.temperature = 0.0
        last_s: float | None = None
        async with aclosing(client.generate(request, timeout_s=_TIMEOUT_S)) as events:
            async for event in events:
                if not event.HasField("tokens"):
                    continue
                now_s = time.perf_counter()
                if counting.window is not None:
                    _count(counting.window, event.tokens)
                    if last_s is not None:
                        counting.window.gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s


def _count(window: Window, chunk: TokenChunk) -> None:
    window.chunks += 1
    window.tokens += len(chunk.tokens)
    window.drafted += sum(step.drafted for step in chunk.verify_steps)


async def _state(client: GatewayClient) -> GateState:
    return await client.gate_state(timeout_s=_TIMEOUT_S)
