"""A gateway that is busy sends fewer messages that say the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.upstream.coalescing import CoalescingConfig
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import Client, Outcome, connected, running_gateway
from tests.support.session import SessionCall

ALWAYS = CoalescingConfig(busy_chunks_per_s=0, max_delay_ms=20)
FOR_EVER = CoalescingConfig(busy_chunks_per_s=0, max_delay_ms=1e7)


@asynccontextmanager
async def client_of(triton: FakeTriton, coalescing: CoalescingConfig) -> AsyncIterator[Client]:
    async with (
        running_gateway(triton.target, coalescing=coalescing) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client


@pytest.fixture
async def busy(triton: FakeTriton) -> AsyncIterator[Client]:
    """A client of a gateway whose chunks always wait for each other, a moment."""
    async with client_of(triton, ALWAYS) as client:
        yield client


@pytest.fixture
async def endlessly_busy(triton: FakeTriton) -> AsyncIterator[Client]:
    """The same, and they wait for ever."""
    async with client_of(triton, FOR_EVER) as client:
        yield client


def said(outcome: Outcome) -> dict[str, Any]:
    """What it said, whatever it was cut into."""
    return {
        "text": outcome.text,
        "tokens": [token.SerializeToString() for token in outcome.tokens],
        "steps": [
            each.SerializeToString() for chunk in outcome.chunks for each in chunk.verify_steps
        ],
        "started": outcome.events[0].started.prompt_tokens,
        "finished": outcome.finished.SerializeToString(),
    }


def speculated(index: int, drafted: int, accepted: int) -> Step:
    return Step(
        {
            "output_ids": [100 * index + place for place in range(accepted + 1)],
            "text_output": f"{index} ",
            "draft_lens": [drafted],
            "accepted_lens": [accepted],
            "draft_source": [1 if drafted else 0],
            "draft_ids": list(range(drafted)),
        },
        delay_s=0.001,
    )


@given(
    st.lists(
        st.one_of(
            st.none(), st.tuples(st.integers(0, 3), st.integers(0, 2)).map(lambda n: (sum(n), n[0]))
        ),
        min_size=1,
        max_size=30,
    )
)
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
async def test_fewer_events_say_the_same(
    busy: Client, client: Client, triton: FakeTriton, steps: list[tuple[int, int] | None]
) -> None:
    triton.default = Script(
        [
            speculated(index, *counts)
            if counts
            else Step({"output_ids": [100 * index], "text_output": f"{index} "}, delay_s=0.001)
            for index, counts in enumerate(steps)
        ]
    )
    alone = await client.generate(prompt="Hi", return_drafts=True)
    together = await busy.generate(prompt="Hi", return_drafts=True)
    assert said(together) == said(alone)
    assert len(alone.chunks) == len(steps)
    assert len(together.chunks) <= len(steps)
    assert together.kinds == ["started", *["tokens"] * len(together.chunks), "finished"]


async def test_many_steps_come_as_few_events(busy: Client, triton: FakeTriton) -> None:
    triton.default = Script([speculated(index, 2, 1) for index in range(60)])
    outcome = await busy.generate(prompt="Hi")
    assert len(outcome.chunks) < 60
    assert len(outcome.tokens) == 120
    assert outcome.text == "".join(f"{index} " for index in range(60))


async def test_in_a_session_too(busy: Client, triton: FakeTriton) -> None:
    triton.default = Script([speculated(index, 2, 1) for index in range(60)])
    session = SessionCall(busy)
    for name in "ab":
        await session.start(name)
    assert await session.finish() is grpc.StatusCode.OK
    for name in "ab":
        outcome = session.of(name)
        assert len(outcome.chunks) < 60
        assert [token.id for token in outcome.tokens] == [
            100 * index + place for index in range(60) for place in (0, 1)
        ]


async def test_neither_the_first_event_nor_the_last_waits(
    endlessly_busy: Client, triton: FakeTriton
) -> None:
    first = Step({"output_ids": [1], "text_output": "a"})
    rest = [Step({"output_ids": [n], "text_output": f"{n}"}, delay_s=0.05) for n in (2, 3, 4)]
    triton.default = Script([first, *rest])
    call = endlessly_busy.generation.Generate(pb.GenerateRequest(prompt="Hi"))
    async with asyncio.timeout(20):
        events = [event async for event in call]
    assert [event.WhichOneof("event") for event in events[:2]] == ["started", "tokens"]
    assert events[1].tokens.text == "a"
    assert "".join(event.tokens.text for event in events) == "a234"
    assert events[-1].finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_stop_string_is_found_at_once(endlessly_busy: Client, triton: FakeTriton) -> None:
    triton.default = Script(
        [*words("a", "b", "stop").steps, Step({"output_ids": [9], "text_output": "c"}, 0.05)],
        endless=True,
    )
    async with asyncio.timeout(20):
        outcome = await endlessly_busy.generate(prompt="Hi", stop=["stop"])
    assert outcome.text == "ab"
    assert outcome.finished.stop_string == "stop"


async def test_a_cancel_reaches_one_that_waits(endlessly_busy: Client, triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1], "text_output": "x"}, 0.005)], endless=True)
    session = SessionCall(endlessly_busy)
    await session.start("a")
    await session.until(lambda: bool(session.of("a").chunks))
    await session.cancel("a")
    outcome = await session.until_ended("a")
    assert outcome.kinds[-1] == "finished"
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])
    assert await session.finish() is grpc.StatusCode.OK
