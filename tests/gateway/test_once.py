"""GenerateOnce: the whole generation in one answer."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import MODEL, Client, refused


async def test_it_brings_text_usage_speculation_and_finish(
    client: Client, triton: FakeTriton
) -> None:
    drafts = {"draft_lens": [2], "accepted_lens": [1], "draft_source": [2]}
    triton.scripts = [words("Hello", " world", **drafts)]
    answer = await client.generate_once(prompt="Hi", request_id="abc")
    (choice,) = answer.choices
    assert (choice.index, choice.text) == (0, "Hello world")
    assert (choice.started.request_id, choice.started.model) == ("abc", MODEL)
    assert choice.started.prompt_tokens == 3
    assert list(choice.tokens) == []
    assert choice.finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert choice.finished.speculation.accepted_tokens == 2
    assert answer.usage == choice.finished.usage
    assert answer.usage == pb.Usage(prompt_tokens=3, output_tokens=2, cached_tokens=1)


async def test_it_says_the_same_as_the_stream(client: Client) -> None:
    streamed = await client.generate(prompt="Hi")
    once = await client.generate_once(prompt="Hi", return_tokens=True)
    assert list(once.choices[0].tokens) == streamed.tokens
    assert once.choices[0].text == streamed.text
    assert once.choices[0].finished == streamed.finished


async def test_stop_strings_and_choices_work_in_it(client: Client, triton: FakeTriton) -> None:
    triton.default = words("one", " two ", "three")
    answer = await client.generate_once(prompt="Hi", stop=["two", "three"], n=2)
    assert [choice.text for choice in answer.choices] == ["one ", "one "]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.finished.stop_string for choice in answer.choices] == ["two", "two"]
    assert answer.usage == pb.Usage(prompt_tokens=6, output_tokens=4, cached_tokens=2)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "generation.prompt"), ({"prompt": "Hi", "max_tokens": 0}, "generation.max_tokens")],
)
async def test_errors_name_fields_from_the_root(
    client: Client, fields: dict[str, int], field: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, field) as outcome:
        await client.generate_once(**fields)
    assert outcome.message.startswith(f"{field}: got ")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "generation"):
        await client.generation.GenerateOnce(pb.GenerateOnceRequest())


async def test_a_failure_is_the_status_and_nothing_else(client: Client, triton: FakeTriton) -> None:
    failure = to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "gone"))
    triton.scripts = [
        Script(words("a").steps, in_band_error=failure),
        Script(words("a").steps, finish_reason="deadline"),
    ]
    with refused(grpc.StatusCode.UNAVAILABLE) as outcome:
        await client.generate_once(prompt="Hi")
    assert outcome.message == "gone"
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        await client.generate_once(prompt="Hi")
    assert (await client.generate_once(prompt="Hi")).choices[0].text == "Hello world"


async def test_leaving_ends_the_generation(client: Client, triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [10]}, delay_s=0.005)], endless=True)
    waiting = asyncio.create_task(client.generate_once(prompt="Hi"))
    await triton.wait_for(lambda: bool(triton.generations))
    waiting.cancel()
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate_once(prompt="Hi", timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await triton.wait_for(lambda: len(triton.stops) == 2)
