"""Crowds of clients without manners, on every kind of call that streams."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from draftgate._pb.draftgate.v1 import gate_pb2, session_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from tests.fakes.triton import FakeTriton
from tests.support.good_requests import text_request
from tests.support.rude import RudeClient

__all__ = ["GENERATING", "WATCHING", "Opening", "all_stopped", "crowd"]


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(frozen=True)
class Opening:
    """How a client begins."""

    path: str
    messages: Sequence[Message]
    half_close: bool = True


_GENERATION = pb.GenerateRequest(prompt="Hi")

GENERATING = (
    Opening("/draftgate.v1.GenerationService/Generate", [_GENERATION]),
    Opening(
        "/draftgate.v1.SessionService/Session",
        [
            session_pb2.SessionRequest(
                id="one", start=session_pb2.SessionStart(generation=_GENERATION)
            )
        ],
        half_close=False,
    ),
    Opening("/inference.GRPCInferenceService/ModelStreamInfer", [text_request()]),
)
"""Each runs one generation."""

WATCHING = (
    Opening("/grpc.health.v1.Health/Watch", [health_pb2.HealthCheckRequest()]),
    Opening("/draftgate.v1.GateService/WatchState", [gate_pb2.WatchStateRequest(interval_ms=500)]),
    Opening("/draftgate.v1.GateService/WatchSteps", [gate_pb2.WatchStepsRequest(interval_ms=500)]),
)
"""Each goes on for ever, and runs none."""


@asynccontextmanager
async def crowd(
    port: int, count: int, openings: Sequence[Opening]
) -> AsyncIterator[list[RudeClient]]:
    """So many clients, each on a connection of its own, that have read one message. At the end all
    of them vanish."""
    found: list[RudeClient] = []

    async def begin(opening: Opening) -> None:
        client = await RudeClient.connect(port)
        found.append(client)
        client.call(opening.path, opening.messages, half_close=opening.half_close)
        await client.message()

    try:
        # Not all in the same moment: the queue of connections that nobody has accepted is short.
        for first in range(0, count, 50):
            numbers = range(first, min(first + 50, count))
            begun = (begin(openings[number % len(openings)]) for number in numbers)
            await asyncio.gather(*begun)
        yield found
    finally:
        for client in found:
            client.vanish()


async def all_stopped(triton: FakeTriton) -> None:
    """Wait until the model server has been told to stop whatever did not end by itself."""
    left = [each for each in triton.generations if each.ended != "finished"]
    await triton.wait_for(lambda: all(each.ended for each in left))
    assert {each.id for each in left} == set(triton.stops)
