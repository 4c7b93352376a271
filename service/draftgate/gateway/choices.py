"""Several generations of one request, side by side, as one stream of events."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from draftgate.errors import DraftgateError
from draftgate.gateway.core import GenerationCore, Running
from draftgate.gateway.events import Event
from draftgate.gateway.validate import GenerationCall

__all__ = ["run_choices"]

_HandOver = asyncio.Queue[Event | Exception | None]


@asynccontextmanager
async def run_choices(core: GenerationCore, call: GenerationCall) -> AsyncIterator[Running]:
    """The events of all `call.n` choices as they come; `event.index` says whose each is.

    As `core.run` otherwise: leaving ends all of them, and so does the first that fails, with its
    error behind its events.
    """
    if call.n == 1:
        async with core.run(call) as running:
            yield running
        return
    # One place: a choice that nobody reads waits, and its own buffer has the limits.
    hand_over: _HandOver = asyncio.Queue(maxsize=1)
    running_now: set[Running] = set()
    tasks = [
        asyncio.create_task(_forward(core, choice, hand_over, running_now))
        for choice in _told_apart(call)
    ]
    try:
        async with aclosing(_merged(hand_over, call.n)) as events:
            yield Running(events, lambda error: _end(running_now, error))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _told_apart(call: GenerationCall) -> list[GenerationCall]:
    """The calls of the single choices; the first is as it would be alone."""
    return [call, *(_other(call, index) for index in range(1, call.n))]


def _other(call: GenerationCall, index: int) -> GenerationCall:
    sampling = call.request.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=_seed(sampling.seed, index))
    request_id = f"{call.request.request_id}.{index}"
    request = replace(call.request, request_id=request_id, sampling=sampling)
    return replace(call, request=request, index=index, echo=False)


def _seed(seed: int, index: int) -> int:
    """Mixed, not counted up: the second choice of seed 5 must not be the first one of seed 6."""
    mixed = hashlib.blake2b(struct.pack("<QI", seed, index), digest_size=8)
    return int.from_bytes(mixed.digest(), "little")


def _end(running: set[Running], error: DraftgateError) -> bool:
    """End those that run; whether there are any. The others end with them."""
    for each in running:
        each.end(error)
    return bool(running)


async def _forward(
    core: GenerationCore,
    choice: GenerationCall,
    hand_over: _HandOver,
    running_now: set[Running],
) -> None:
    end: Exception | None = None
    try:
        async with core.run(choice) as running:
            running_now.add(running)
            try:
                async for event in running:
                    await hand_over.put(event)
            finally:
                running_now.remove(running)
    except Exception as error:  # noqa: BLE001 - raised again where the events are read
        end = error
    await hand_over.put(end)


async def _merged(hand_over: _HandOver, running: int) -> AsyncGenerator[Event, None]:
    while running:
        event = await hand_over.get()
        if isinstance(event, Exception):
            raise event
        if event is None:
            running -= 1
        else:
            yield event
