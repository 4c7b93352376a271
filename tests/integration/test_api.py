"""Stop strings, choices, sessions and the tokenizer on the real stack."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import tokenizer_pb2
from draftgate.upstream.client import TritonClient, TritonClientConfig
from tests.integration.conftest import Served
from tests.support.gateway import Client
from tests.support.session import SessionCall

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

GREEDY = pb.SamplingParameters(temperature=0.0, ignore_eos=True)
COUNTING = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"


@pytest.mark.parametrize("max_draft_len", [0, 4])
async def test_a_stop_string_cuts_the_text_and_frees_the_row(
    client: Client, served: Served, max_draft_len: int
) -> None:
    request: dict[str, Any] = {
        "prompt": COUNTING,
        "sampling": GREEDY,
        "max_draft_len": max_draft_len,
    }
    whole = (await client.generate(**request, max_tokens=60)).text
    stop = whole[20:26]
    outcome = await client.generate(**request, max_tokens=1500, stop=["never there", stop])
    assert outcome.text == whole[: whole.index(stop)]
    assert outcome.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert outcome.finished.stop_string == stop
    assert outcome.finished.usage.output_tokens == len(outcome.tokens) < 60
    triton = TritonClient(TritonClientConfig(served.triton))
    try:
        async with asyncio.timeout(30):
            while (await triton.counters()).running_rows:
                await asyncio.sleep(0.02)
    finally:
        await triton.close()


async def test_choices_are_seeded_apart_and_the_first_is_the_lone_one(client: Client) -> None:
    request: dict[str, Any] = {
        "prompt": "Once upon a time",
        "sampling": pb.SamplingParameters(temperature=1.0, seed=11, ignore_eos=True),
        "max_tokens": 24,
    }
    alone = await client.generate_once(**request)
    several, again = await asyncio.gather(
        client.generate_once(**request, n=3), client.generate_once(**request, n=3)
    )
    texts = [choice.text for choice in several.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == alone.choices[0].text
    assert len(set(texts)) == 3
    assert several.usage.output_tokens == 3 * 24


async def test_a_session_says_what_single_calls_say(client: Client) -> None:
    prompts = [f"{COUNTING} {number}," for number in range(13, 19)]
    request: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 24}
    alone = [await client.generate(prompt=prompt, **request) for prompt in prompts]
    session = SessionCall(client)
    await session.start("left", prompt=COUNTING, sampling=GREEDY, max_tokens=1500)
    for prompt in prompts:
        await session.start(prompt[-3:-1], prompt=prompt, credit=1, **request)
    await session.until(lambda: len(session.of("left").tokens) > 5)
    await session.cancel("left")
    for prompt in prompts:
        await session.grant(prompt[-3:-1], 1000)
    assert await session.finish() is grpc.StatusCode.OK
    assert [session.of(prompt[-3:-1]).text for prompt in prompts] == [each.text for each in alone]
    assert session.of("left").finished.usage.output_tokens > 5


async def test_prompts_are_tokenised_as_the_models_do(client: Client) -> None:
    messages = [pb.ChatMessage(role="user", content="Name three colours.")]
    answer = await client.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(messages=messages))
    outcome = await client.generate(messages=messages, sampling=GREEDY, max_tokens=8, echo=True)
    started = outcome.events[0].started
    assert started.prompt_tokens == len(answer.ids)
    back = await client.tokenizer.Tokenize(
        tokenizer_pb2.TokenizeRequest(prompt=started.prompt_text)
    )
    assert back.ids == answer.ids
    ids = [token.id for token in outcome.tokens]
    text = await client.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(ids=ids))
    assert text.text == outcome.text
