"""Many generations on one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from draftgate._pb.draftgate.v1 import session_pb2 as pb
from draftgate._pb.draftgate.v1.generation_pb2 import (
    GenerateResponse,
    GenerationFinished,
    TokenChunk,
)
from draftgate.client import AsyncClient, CallError, DraftgateError, ErrorCode, FinishReason, Tokens
from draftgate.gateway import Gateway
from tests.fakes.triton import FakeTriton, Received, Script, Step, words
from tests.fakes.wire import End, FakeWire, Hang, More

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.002)], endless=True)
MANY = 200
TOKENS = GenerateResponse(tokens=TokenChunk(text="text"))
FINISHED = GenerateResponse(finished=GenerationFinished())


def by_prompt(received: Received) -> Script:
    """`endless` and `many` are what they say; other prompts come back in five pieces."""
    prompt = received.tensors["text_input"]
    if prompt == "endless":
        return ENDLESS
    if prompt == "many":
        return words(*["x"] * MANY)
    return words(*[f"{prompt}{n} " for n in range(5)])


@pytest.fixture(autouse=True)
def answering(triton: FakeTriton) -> None:
    triton.script_for = by_prompt


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(f"127.0.0.1:{gateway.port}") as found:
        await found.wait_serving(timeout_s=30)
        yield found


@pytest.fixture
async def wired(wire: FakeWire) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(wire.address) as found:
        yield found


async def test_generations_run_side_by_side(client: AsyncClient, triton: FakeTriton) -> None:
    async with client.session(timeout_s=30) as session:
        generations = [session.generate(f"p{n}.", seed=n) for n in range(20)]
        assert len({each.id for each in generations}) == 20
        texts = await asyncio.gather(*(each.text() for each in generations))
    assert texts == ["".join(f"p{n}.{piece} " for piece in range(5)) for n in range(20)]
    assert sorted(each.tensors["seed"][0] for each in triton.generations) == list(range(20))


async def test_one_is_left_and_the_others_go_on(client: AsyncClient, triton: FakeTriton) -> None:
    async with client.session() as session:
        other = session.generate("other ")
        async with session.generate("endless") as generation:
            async for event in generation:
                if isinstance(event, Tokens):
                    break
        await triton.wait_for(lambda: len(triton.stops) == 1)
        assert await other.text() == "other 0 other 1 other 2 other 3 other 4 "
        assert await session.generate("new ").text() == "new 0 new 1 new 2 new 3 new 4 "


async def test_a_cancelled_one_says_what_was_done(client: AsyncClient) -> None:
    async with client.session() as session:
        generation = session.generate("endless")
        while not isinstance(await anext(generation), Tokens):
            pass
        generation.cancel()
        with pytest.raises(CallError) as caught:
            await generation.text()
    assert caught.value.code is ErrorCode.CANCELLED
    assert generation.finished is not None
    assert generation.finished.usage.output_tokens
    assert generation.text_so_far.startswith("x")


async def test_a_refused_one_names_its_field(client: AsyncClient) -> None:
    async with client.session() as session:
        with pytest.raises(CallError) as caught:
            await session.generate("Hi", top_p=3.0).text()
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert caught.value.field == "start.generation.sampling.top_p"
        assert await session.generate("a").text()


async def test_each_has_a_time_limit_of_its_own(client: AsyncClient) -> None:
    async with client.session() as session:
        other = session.generate("a")
        with pytest.raises(CallError) as caught:
            await session.generate("endless", timeout_s=0.2).text()
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
        assert await other.text()


async def test_a_slow_reader_holds_up_nobody_and_loses_nothing(client: AsyncClient) -> None:
    async with client.session(window=4) as session:
        slow, quick = session.generate("many"), session.generate("many")
        assert await quick.text() == "x" * MANY
        await anext(slow)
        # It has been told no more than its window, and the start.
        assert slow.unread <= 5
        assert await slow.text() == "x" * MANY
        assert slow.finished is not None
        assert slow.finished.finish_reason is FinishReason.LENGTH


async def test_leaving_the_session_ends_all(client: AsyncClient, triton: FakeTriton) -> None:
    async with client.session() as session:
        generations = [session.generate("endless") for _ in range(3)]
        for generation in generations:
            await anext(generation)
    await triton.wait_for(lambda: len(triton.stops) == 3)
    for generation in generations:
        with pytest.raises(CallError) as caught:
            await generation.text()
        assert caught.value.code is ErrorCode.CANCELLED
    with pytest.raises(CallError):
        session.generate("late")


async def test_a_session_that_fails_fails_all(wired: AsyncClient, wire: FakeWire) -> None:
    wire.scripts.append([End(grpc.StatusCode.UNAVAILABLE, "going down")])
    async with wired.session() as session:
        first, second = session.generate("a"), session.generate("b")
        for generation in (first, second):
            with pytest.raises(CallError, match="going down"):
                await generation.text()
        with pytest.raises(CallError, match="going down"):
            session.generate("c")


async def test_a_session_that_the_server_ends_fails_what_runs(
    wired: AsyncClient, wire: FakeWire
) -> None:
    wire.scripts.append([])
    async with wired.session() as session:
        with pytest.raises(CallError, match="the session ended") as caught:
            await session.generate("a").text()
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_the_time_of_the_session_is_its_deadline(wired: AsyncClient, wire: FakeWire) -> None:
    wire.scripts.append([Hang()])
    async with wired.session(timeout_s=0.2) as session:
        with pytest.raises(CallError) as caught:
            await session.generate("a").text()
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


def answer(name: str, **content: object) -> pb.SessionResponse:
    return pb.SessionResponse(id=name, **content)  # type: ignore[arg-type]


def turned_away() -> pb.SessionStatus:
    status = End(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0.01).status()
    return pb.SessionStatus(code=status.code, message=status.message, details=status.details)


async def test_what_was_turned_away_comes_again(wired: AsyncClient, wire: FakeWire) -> None:
    wire.scripts.append(
        [
            answer("1", ended=turned_away()),
            answer("nobody", event=TOKENS),
            More(1),
            answer("1"),  # Of a kind that this version does not know.
            answer("1", event=TOKENS),
            answer("1", event=FINISHED),
            answer("1", ended=pb.SessionStatus()),
            Hang(),
        ]
    )
    async with wired.session() as session:
        generation = session.generate("a")
        assert await generation.text() == "text"
        assert generation.finished is not None
    first = pb.SessionRequest.FromString(wire.calls[0].request)
    again = pb.SessionRequest.FromString(wire.more[0])
    assert again == first


async def test_what_has_begun_does_not_come_again(wired: AsyncClient, wire: FakeWire) -> None:
    wire.scripts.append([answer("1", event=TOKENS), answer("1", ended=turned_away()), Hang()])
    async with wired.session() as session:
        generation = session.generate("a")
        with pytest.raises(CallError, match="full"):
            await generation.text()
        assert generation.text_so_far == "text"
        assert wire.more == []


async def test_a_session_is_used_as_it_is_meant(client: AsyncClient) -> None:
    with pytest.raises(DraftgateError, match="window: got 1, allowed: an integer from 2 on"):
        client.session(window=1)
    with pytest.raises(CallError, match="the session has not been entered"):
        client.session().generate("Hi")
