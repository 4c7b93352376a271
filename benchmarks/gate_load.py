"""Loads on a running service, and what comes of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from draftgate._pb.draftgate.v1.gate_pb2 import GATE_MODE_AUTO, GatePolicy, GateState, GateStep
from draftgate._pb.draftgate.v1.generation_pb2 import GATE_REASON_OPERATOR, GenerateRequest
from draftgate.cli.client import GatewayClient

__all__ = ["Job", "Part", "alternate", "answer_in_turn", "apart", "load", "run_steps"]

_TIMEOUT_S = 300.0
_POLL_MS = 1000

Job = tuple[Sequence[int], int]
"""A prompt's token ids, and the most tokens of its answer."""


@dataclass
class Part:
    """What steps emitted, and how long they took."""

    tokens: int = 0
    seconds: float = 0.0
    row_steps: int = 0
    """Rows that decoded, over all steps."""
    drafted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_draft_len(self) -> float:
        """Drafted tokens of a row in a step."""
        return self.drafted / max(self.row_steps, 1)

    def add(self, other: Part) -> None:
        """Count another's too."""
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.row_steps += other.row_steps
        self.drafted += other.drafted

    def count(self, step: GateStep, seconds: float) -> None:
        """Count a step."""
        self.tokens += step.emitted_tokens
        self.seconds += seconds
        self.row_steps += step.rows
        self.drafted += step.drafted_tokens


@asynccontextmanager
async def load(
    client: GatewayClient, jobs: Sequence[Job], streams: int, gaps_ms: list[float] | None = None
) -> AsyncIterator[None]:
    """Keep `streams` generations running, each followed by the next, greedy.

    gaps_ms: takes the time between two chunks of one stream.
    """
    queue = itertools.cycle(jobs)
    tasks = [asyncio.create_task(_stream(client, queue, gaps_ms)) for _ in range(streams)]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await _idle(client)


async def alternate(
    client: GatewayClient,
    cases: Mapping[str, GatePolicy],
    orders: Sequence[Sequence[str]],
    segment_s: float,
) -> list[dict[str, Part]]:
    """Give the gate one policy after the other, each for so long, while a load runs; what came of
    each case in each round.

    orders: of the cases, by round. All of a round falls on the same requests and, as nearly as can
    be, on the same moment of a machine whose speed changes.
    """
    return await _in_turn(client, cases, orders, lambda _: asyncio.sleep(segment_s))


async def answer_in_turn(
    client: GatewayClient,
    cases: Mapping[str, GatePolicy],
    orders: Sequence[Sequence[str]],
    jobs: Sequence[Job],
) -> list[dict[str, Part]]:
    """Give the gate one policy after the other, and in each round all of them the same single
    answer to write: with one stream the texts of two moments differ more than policies do.

    orders: of the cases, by round.
    """

    async def answer(number: int) -> None:
        await _stream(client, iter([jobs[number % len(jobs)]]), None)

    return await _in_turn(client, cases, orders, answer)


async def apart(
    clients: Mapping[str, GatewayClient],
    cases: Mapping[str, GatePolicy],
    orders: Sequence[Sequence[str]],
    jobs: Sequence[Job],
    streams: int,
    segment_s: float,
) -> list[dict[str, Part]]:
    """The same where cases have services of their own, so that no gate learns from other cases:
    the load goes from one to the other, and begins alike in all cases of a round."""
    found = []
    for number, order in enumerate(orders):
        first = number * streams % len(jobs)
        given = [*jobs[first:], *jobs[:first]]
        parts: dict[str, Part] = {}
        for case in order:
            client, one = clients[case], {case: cases[case]}
            if streams == 1:
                [part] = await answer_in_turn(client, one, [[case]], given)
            else:
                async with load(client, given, streams):
                    await _filled(client, streams)
                    [part] = await alternate(client, one, [[case]], segment_s)
            parts.update(part)
        found.append(parts)
    return found


async def _in_turn(
    client: GatewayClient,
    cases: Mapping[str, GatePolicy],
    orders: Sequence[Sequence[str]],
    turn: Callable[[int], Awaitable[None]],
) -> list[dict[str, Part]]:
    """What came of each case in each round. turn: what a case lasts for, by the round's number."""
    steps: list[GateStep] = []
    watching = asyncio.create_task(_watch(client, steps))
    begun: list[tuple[int, int, str]] = []
    try:
        for number, order in enumerate(orders):
            for case in order:
                state = await client.set_gate_policy(cases[case], save=False, timeout_s=_TIMEOUT_S)
                begun.append((state.steps, number, case))
                await _over(watching, turn(number))
        last = (await client.gate_state(timeout_s=_TIMEOUT_S)).steps
        while not steps or steps[-1].step < last:
            await _over(watching, asyncio.sleep(_POLL_MS / 1e3))
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    found: list[dict[str, Part]] = [defaultdict(Part) for _ in orders]
    place = -1
    for step, following in itertools.pairwise(steps):
        while place + 1 < len(begun) and begun[place + 1][0] < step.step:
            place += 1
        if place < 0:
            continue
        _, number, case = begun[place]
        # The first step or two after a change still had the policy before.
        if _obeys(step, cases[case]) and following.step == step.step + 1:
            found[number][case].count(step, following.time_s - step.time_s)
    return found


async def run_steps(client: GatewayClient, count: int) -> None:
    """Wait until the engine has run so many steps more."""
    end = (await client.gate_state(timeout_s=_TIMEOUT_S)).steps + count
    await _until(client, lambda state: state.steps >= end)


async def _filled(client: GatewayClient, rows: int) -> None:
    """Wait until so many run, and their prompts are done."""
    await _until(client, lambda state: state.running_rows >= rows)
    await run_steps(client, 2)


async def _until(client: GatewayClient, condition: Callable[[GateState], bool]) -> None:
    """Look at the gate's state until the condition holds."""
    while not condition(await client.gate_state(timeout_s=_TIMEOUT_S)):  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)


def _obeys(step: GateStep, policy: GatePolicy) -> bool:
    ordered = step.reason == GATE_REASON_OPERATOR
    if policy.mode == GATE_MODE_AUTO:
        return not ordered
    return ordered and step.draft_len == policy.draft_len


async def _watch(client: GatewayClient, steps: list[GateStep]) -> None:
    async with aclosing(client.watch_steps(interval_ms=_POLL_MS)) as responses:
        async for response in responses:
            steps.extend(response.steps)


async def _over(task: asyncio.Task[None], turn: Awaitable[None]) -> None:
    """Await `turn`. Raises what the task raised."""
    turning = asyncio.ensure_future(turn)
    try:
        await asyncio.wait([task, turning], return_when=asyncio.FIRST_COMPLETED)
    finally:
        turning.cancel()
    if task.done():
        task.result()
    await turning


async def _idle(client: GatewayClient) -> None:
    """Wait until the engine has dropped what was cancelled: two engines that compute at once slow
    each other down many times over."""
    await _until(client, lambda state: not state.running_rows + state.waiting_rows)


async def _stream(client: GatewayClient, jobs: Iterator[Job], gaps_ms: list[float] | None) -> None:
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
                if gaps_ms is not None and last_s is not None:
                    gaps_ms.append(1e3 * (now_s - last_s))
                last_s = now_s
