"""Tokenize, Detokenize and echo: prompts between text and ids in the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import tokenizer_pb2
from draftgate.text import Message, Tokenizer
from tests.fakes.triton import DESCRIPTION, FakeTriton
from tests.support.gateway import MODEL, Client, connected, refused, running_gateway

CHAT = [pb.ChatMessage(role="user", content="Grüße, 你好"), pb.ChatMessage(role="assistant")]
LONG = "Grüße, 你好 🙂 " * 2000


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_dir)


@pytest.fixture
async def knowing(
    triton: FakeTriton, checkpoint_dir: Path, tokenizer: Tokenizer
) -> AsyncIterator[Client]:
    """A client of a gateway that has the tokenizer."""
    triton.description = {**DESCRIPTION, "vocab_size": tokenizer.vocab_size}
    async with (
        running_gateway(
            triton.target, tokenizer_dir=checkpoint_dir, max_detokenize_ids=50_000
        ) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client


async def tokenize(client: Client, **fields: Any) -> list[int]:
    answer = await client.tokenizer.Tokenize(tokenizer_pb2.TokenizeRequest(**fields))
    return list(answer.ids)


async def detokenize(client: Client, **fields: Any) -> str:
    answer = await client.tokenizer.Detokenize(tokenizer_pb2.DetokenizeRequest(**fields))
    return answer.text


@pytest.mark.parametrize("text", ["a", "Hello <|im_start|>x", LONG])
async def test_a_prompt_and_back(knowing: Client, tokenizer: Tokenizer, text: str) -> None:
    ids = await tokenize(knowing, prompt=text, model=MODEL)
    assert ids == tokenizer.encode_prompt(text)
    assert await detokenize(knowing, ids=ids, model=MODEL) == tokenizer.decode(ids)


async def test_messages_go_through_the_template(knowing: Client, tokenizer: Tokenizer) -> None:
    messages = [pb.ChatMessage(role="system", content="Be brief."), CHAT[0]]
    expected = [Message(each.role, each.content) for each in messages]
    assert await tokenize(knowing, messages=messages) == tokenizer.encode_chat(expected)


async def test_no_ids_have_no_text(knowing: Client) -> None:
    assert await detokenize(knowing) == ""


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * (2**20 + 1)}, "prompt"),
        ({"prompt": "Hi", "messages": CHAT}, "messages"),
        ({"messages": CHAT}, "messages[1].content"),
        ({"messages": [pb.ChatMessage(role="robot", content="Hi")]}, "messages[0].role"),
    ],
)
async def test_what_cannot_be_tokenised_is_refused_by_name(
    knowing: Client, fields: dict[str, Any], field: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, field) as outcome:
        await tokenize(knowing, **fields)
    assert outcome.message.startswith(f"{field}: got ")


@pytest.mark.parametrize(
    ("ids", "field"),
    [([-1], "ids[0]"), ([1, 49152], "ids[1]"), ([2**31 - 1], "ids[0]"), ([5] * 50_001, "ids")],
)
async def test_ids_that_are_none_are_refused_by_name(
    knowing: Client, ids: list[int], field: str
) -> None:
    with refused(grpc.StatusCode.INVALID_ARGUMENT, field):
        await detokenize(knowing, ids=ids)
    assert len(await detokenize(knowing, ids=[500] * 50_000)) >= 50_000


async def test_another_model_is_not_found(knowing: Client) -> None:
    with refused(grpc.StatusCode.NOT_FOUND):
        await tokenize(knowing, prompt="Hi", model="other")
    with refused(grpc.StatusCode.NOT_FOUND):
        await detokenize(knowing, model="other")


async def test_without_a_tokenizer_it_says_so(client: Client) -> None:
    with refused(grpc.StatusCode.FAILED_PRECONDITION) as outcome:
        await tokenize(client, prompt="Hi")
    assert "this server has no tokenizer" in outcome.message
    with refused(grpc.StatusCode.FAILED_PRECONDITION):
        await detokenize(client, ids=[1])


async def test_it_does_not_need_the_engine(knowing: Client, triton: FakeTriton) -> None:
    triton.server_ready = False
    await knowing.wait_serving(False)
    assert await tokenize(knowing, prompt="Hi")


async def echoed(client: Client, **fields: Any) -> str:
    started = (await client.generate(echo=True, **fields)).events[0].started
    assert started.HasField("prompt_text")
    return started.prompt_text


async def test_echo_returns_the_prompts_text(knowing: Client, tokenizer: Tokenizer) -> None:
    assert await echoed(knowing, prompt="Grüße <|im_start|>") == "Grüße <|im_start|>"
    message = Message("user", "Grüße")
    chat = await echoed(knowing, messages=[pb.ChatMessage(role="user", content="Grüße")])
    assert chat == tokenizer.render_chat([message])
    assert "<|im_start|>user\nGrüße<|im_end|>" in chat
    ids = tokenizer.encode_prompt("One two three four")
    assert await echoed(knowing, input_ids=ids) == "One two three four"
    assert await echoed(knowing, input_ids=ids, resume_len=1) == "One two three"


async def test_echo_of_a_raw_prompt_needs_no_tokenizer(client: Client) -> None:
    assert await echoed(client, prompt="Hi there") == "Hi there"
    started = (await client.generate(prompt="Hi there")).events[0].started
    assert not started.HasField("prompt_text")


async def test_echo_stands_in_the_first_choice(client: Client) -> None:
    outcome = await client.generate(prompt="Hi", echo=True, n=2)
    started = [event for event in outcome.events if event.HasField("started")]
    assert {event.index: event.started.prompt_text for event in started} == {0: "Hi", 1: ""}
