"""The client of one Triton server against a strict stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest

from draftgate import contract
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from draftgate.sampling import SamplingParams
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.probe import not_ready_reason
from draftgate.upstream.types import Chunk, GenerationRequest, TextPrompt
from tests.fakes.triton import DESCRIPTION, FakeTriton, Script, Step, words

ENDLESS = Script([Step({"output_ids": [1], "text_output": "x"}, delay_s=0.005)], endless=True)


@pytest.fixture
async def upstream(triton: FakeTriton) -> AsyncIterator[TritonClient]:
    client = TritonClient(TritonClientConfig(triton.target, drain_timeout_s=0.2))
    yield client
    await client.close()


def request(request_id: str = "abc", **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id, TextPrompt("Hi"), SamplingParams(max_tokens=9), **fields)


async def chunks(client: TritonClient) -> list[Chunk]:
    async with client.generate(request()).started() as found:
        return [chunk async for chunk in found]


async def test_chunks_come_to_the_end(upstream: TritonClient, triton: FakeTriton) -> None:
    first, second = await chunks(upstream)
    assert (first.index, first.text, first.token_ids) == (0, "Hello", (10,))
    assert first.prompt is not None
    assert first.prompt.prompt_tokens == 3
    assert (second.text, second.finish_reason, second.prompt) == (" world", "length", None)
    await triton.wait_for(lambda: triton.generations[0].ended == "finished")
    assert triton.stops == []


async def test_metadata_goes_with_the_generation_only(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    async with upstream.generate(request()).started([("traceparent", "00-ab")]) as found:
        assert [chunk.text async for chunk in found] == ["Hello", " world"]
    assert triton.generations[0].metadata["traceparent"] == "00-ab"
    await chunks(upstream)
    assert "traceparent" not in triton.generations[1].metadata


async def test_leaving_early_stops_and_reads_to_the_end(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    async with upstream.generate(request()).started() as found:
        await anext(found)
        wire_id = found.wire_id
    await triton.wait_for(lambda: triton.generations[0].ended == "stopped")
    assert triton.stops == [wire_id]


async def test_the_stop_survives_a_cancelled_consumer(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    task = asyncio.create_task(chunks(upstream))
    await triton.wait_for(lambda: bool(triton.generations))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await triton.wait_for(lambda: triton.generations[0].ended == "stopped")


async def test_a_consumer_that_never_reads_stops_it_too(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    async with upstream.generate(request()).started():
        pass
    await upstream.close()
    assert triton.generations == [] or triton.stops == [triton.generations[0].id]


async def test_an_engine_that_ignores_the_stop_is_cut_off(
    upstream: TritonClient, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    triton.default = Script(ENDLESS.steps, endless=True, deaf=True)
    async with upstream.generate(request()).started() as found:
        await anext(found)
    await triton.wait_for(lambda: triton.generations[0].ended == "cancelled")
    assert triton.stops == [triton.generations[0].id]
    assert "did not end its stream" in caplog.text


async def test_a_stop_that_fails_is_logged_and_the_stream_cut_off(
    upstream: TritonClient, triton: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    triton.default, triton.refuse_stops = ENDLESS, True
    async with upstream.generate(request()).started() as found:
        await anext(found)
    await triton.wait_for(lambda: triton.generations[0].ended == "cancelled")
    assert "could not be stopped" in caplog.text


async def test_stops_get_through_where_generations_fill_their_connection() -> None:
    triton = FakeTriton()
    await triton.start(max_streams=4)
    triton.default = ENDLESS
    client = TritonClient(TritonClientConfig(triton.target))
    async with AsyncExitStack() as generations:
        for number in range(4):
            generation = client.generate(request(f"r{number}"))
            await anext(await generations.enter_async_context(generation.started()))
        assert await client.server_ready(5.0)
    await triton.wait_for(lambda: len(triton.stops) == 4)
    assert {each.ended for each in triton.generations} == {"stopped"}
    await client.close()
    await triton.stop()


async def test_abandoning_drops_what_waits(upstream: TritonClient, triton: FakeTriton) -> None:
    triton.default = ENDLESS
    async with upstream.generate(request()).started() as found:
        await anext(found)
        found.abandon(DraftgateError(ErrorCode.UNAVAILABLE, "enough"))
        with pytest.raises(DraftgateError, match="enough"):
            await anext(found)


REFUSALS = [
    Script(in_band_error=to_wire(DraftgateError(ErrorCode.RESOURCE_EXHAUSTED, "full"))),
    Script(in_band_error="in ensemble 'ensemble', Exceeds maximum queue size"),
    Script(in_band_error=to_wire(DraftgateError(ErrorCode.INVALID_ARGUMENT, "odd", field="top_k"))),
    Script(in_band_error="Request for unknown model: 'ensemble' is not found"),
    Script(
        status=grpc.StatusCode.UNAVAILABLE, details="This protocol is restricted, expecting header"
    ),
    Script(status=grpc.StatusCode.UNIMPLEMENTED),
]
BREAKS = [
    Script(in_band_error="the postprocessing model broke"),
    Script(in_band_error="Server exiting"),
    Script(status=grpc.StatusCode.INTERNAL),
    Script(status=grpc.StatusCode.UNAVAILABLE),
    Script(no_finish=True),
]


@pytest.mark.parametrize("script", REFUSALS)
async def test_a_refused_generation_is_not_stopped(
    upstream: TritonClient, triton: FakeTriton, script: Script
) -> None:
    triton.scripts = [script]
    with pytest.raises(DraftgateError):
        await chunks(upstream)
    await upstream.close()
    assert len(triton.generations) == 1
    assert triton.stops == []


@pytest.mark.parametrize(
    "script", BREAKS + [replace(each, steps=words("a").steps) for each in REFUSALS]
)
async def test_a_generation_that_broke_or_had_begun_is_stopped(
    upstream: TritonClient, triton: FakeTriton, script: Script
) -> None:
    triton.scripts = [script]
    with pytest.raises(DraftgateError):
        await chunks(upstream)
    await upstream.close()
    assert triton.stops == [triton.generations[0].id]


@pytest.mark.parametrize(
    "values",
    [
        {"chunk_index": 0, "draft_lens": [1], "accepted_lens": [2], "draft_source": [2]},
        {"chunk_index": 0, "draft_lens": [1], "accepted_lens": [1], "draft_source": []},
        {
            "chunk_index": 0,
            "draft_lens": [2],
            "accepted_lens": [1],
            "draft_source": [2],
            "draft_ids": [1],
        },
        {"chunk_index": 0, "output_ids": [1, 2], "token_logprobs": [0.5]},
        {"chunk_index": 0, "output_ids": [1, 2], "top_ids": [1], "top_logprobs": [0.5]},
        {"chunk_index": 0, "output_ids": [1], "top_ids": [1], "top_logprobs": []},
        {"chunk_index": []},
        {"chunk_index": [0, 1]},
    ],
)
async def test_a_response_that_breaks_the_contract_is_an_error(
    upstream: TritonClient, triton: FakeTriton, values: dict[str, Any]
) -> None:
    triton.scripts = [Script([Step(values)])]
    with pytest.raises(DraftgateError, match="broke the tensor contract") as caught:
        await chunks(upstream)
    assert caught.value.code is ErrorCode.INTERNAL
    await triton.wait_for(lambda: len(triton.stops) == 1)


async def test_a_chunk_that_comes_twice_is_an_error(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.scripts = [Script([Step({"chunk_index": 0}), Step({"chunk_index": 0})], endless=True)]
    with pytest.raises(DraftgateError, match="chunk 0 came twice"):
        await chunks(upstream)


async def test_a_lost_chunk_is_an_error(upstream: TritonClient, triton: FakeTriton) -> None:
    triton.scripts = [Script(words("a", "b", "c").steps, order=[0, 2])]
    with pytest.raises(DraftgateError, match="without a finish reason"):
        await chunks(upstream)


async def test_an_unknown_finish_reason_passes_through(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.scripts = [Script(words("a").steps, finish_reason="bored")]
    (chunk,) = await chunks(upstream)
    assert chunk.finish_reason == "bored"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.CANCELLED, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ErrorCode.DEADLINE_EXCEEDED),
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.UNIMPLEMENTED),
        (grpc.StatusCode.INTERNAL, ErrorCode.INTERNAL),
        (grpc.StatusCode.UNKNOWN, ErrorCode.INTERNAL),
    ],
)
async def test_a_status_without_known_text_keeps_its_meaning(
    upstream: TritonClient, triton: FakeTriton, status: grpc.StatusCode, code: ErrorCode
) -> None:
    triton.scripts = [Script(words("a").steps, status=status, details="something new")]
    with pytest.raises(DraftgateError) as caught:
        await chunks(upstream)
    assert caught.value.code is code


async def test_a_server_that_dies_mid_stream_is_unavailable(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    async with upstream.generate(request()).started() as found:
        await anext(found)
        await triton.stop()
        with pytest.raises(DraftgateError) as caught:  # noqa: PT012  # some may be on the way
            while True:
                await anext(found)
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_nobody_listens() -> None:
    client = TritonClient(TritonClientConfig("127.0.0.1:1"))
    with pytest.raises(DraftgateError) as caught:
        await chunks(client)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    with pytest.raises(DraftgateError, match="cannot be reached"):
        await client.describe()
    assert await not_ready_reason(client, 1.0) == "the model server cannot be reached"
    await client.close()


async def test_the_control_plane_describes_and_counts(
    upstream: TritonClient, triton: FakeTriton
) -> None:
    found = await upstream.describe()
    assert (found.name, found.vocab_size, found.eos_token_ids) == ("fake-135m", 1000, (2,))
    assert (found.drafter, found.max_draft_len, found.max_batch_rows) == ("ngram", 4, 8)
    counters = await upstream.counters()
    assert (counters.steps, counters.emitted_tokens) == (7, 9)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"vocab_size": "1000"}, "vocab_size is not an integer"),
        ({"vocab_size": True}, "vocab_size is not an integer"),
        ({"name": None}, "name is not a string"),
        ({"kv_total_tokens": "many"}, "kv_total_tokens is not an integer"),
        ({"has_chat_template": 1}, "has_chat_template is not a boolean"),
        ({"eos_token_ids": [1, "2"]}, "eos_token_ids is not a list of integers"),
    ],
)
async def test_an_unusable_description_is_an_error(
    upstream: TritonClient, triton: FakeTriton, change: dict[str, Any], problem: str
) -> None:
    triton.description = {**DESCRIPTION, **change}
    with pytest.raises(DraftgateError, match=problem):
        await upstream.describe()


async def test_readiness_names_what_is_missing(upstream: TritonClient, triton: FakeTriton) -> None:
    assert await not_ready_reason(upstream, 5.0) == ""
    triton.not_ready_models = {contract.ENGINE_MODEL, contract.POSTPROCESSING_MODEL}
    assert await not_ready_reason(upstream, 5.0) == "models not ready: engine, postprocessing"
    triton.server_ready = False
    assert await not_ready_reason(upstream, 5.0) == "the model server is not ready"
