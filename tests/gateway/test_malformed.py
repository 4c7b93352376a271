"""Requests that must be refused, over the wire; each names the field, and the server goes on."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError
from draftgate.gateway.boundary import decoding
from tests.fakes.triton import DESCRIPTION, FakeTriton
from tests.support.gateway import MODEL, Client

BIG = 2**31 - 1


def sampling(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "sampling": pb.SamplingParameters(**fields)}


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [pb.ChatMessage(role=role, content=content) for role, content in turns]}


CASES: list[tuple[dict[str, Any], str]] = [
    # Which prompt.
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * (2**20 + 1)}, "prompt"),
    ({"prompt": "é" * (2**19 + 1)}, "prompt"),
    ({"prompt": "Hi", **chat(("user", "Hi"))}, "messages"),
    ({"prompt": "", "input_ids": [1]}, "input_ids"),
    ({"input_ids": [1], **chat(("user", "Hi"))}, "input_ids"),
    ({"prompt": "Hi", "input_ids": [1], **chat(("user", "Hi"))}, "messages"),
    # Messages.
    (chat(("robot", "Hi")), "messages[0].role"),
    (chat(("", "Hi")), "messages[0].role"),
    (chat(("User", "Hi")), "messages[0].role"),
    (chat(("user", "Hi"), ("tool", "Hi")), "messages[1].role"),
    (chat(("user", "")), "messages[0].content"),
    (chat(("system", "Be brief."), ("user", "")), "messages[1].content"),
    (chat(*[("user", "Hi")] * 1025), "messages"),
    (chat(("user", "x" * 2**19), ("user", "x" * 2**19 + "y")), "messages"),
    # Token ids; the vocabulary has 1000.
    ({"input_ids": [-1]}, "input_ids[0]"),
    ({"input_ids": [1, 1000]}, "input_ids[1]"),
    ({"input_ids": [1, 2, BIG]}, "input_ids[2]"),
    ({"input_ids": [-(2**31)]}, "input_ids[0]"),
    ({"input_ids": [1] * 512}, "input_ids"),
    # Resuming.
    ({"input_ids": [1, 2], "resume_len": 3}, "resume_len"),
    ({"input_ids": [1, 2], "resume_len": 2}, "resume_len"),
    ({"input_ids": [1], "resume_len": 1}, "resume_len"),
    ({"input_ids": [1, 2], "resume_len": -1}, "resume_len"),
    ({"input_ids": [1, 2, 3], "resume_len": 2, "max_tokens": 2}, "resume_len"),
    ({"prompt": "Hi", "resume_len": 1}, "resume_len"),
    # Lengths.
    ({"prompt": "Hi", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "Hi", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "Hi", "max_tokens": 513}, "max_tokens"),
    ({"prompt": "Hi", "max_tokens": BIG}, "max_tokens"),
    ({"prompt": "Hi", "max_draft_len": -1}, "max_draft_len"),
    # Sampling.
    (sampling(temperature=math.nan), "sampling.temperature"),
    (sampling(temperature=math.inf), "sampling.temperature"),
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=100.5), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.01), "sampling.top_p"),
    (sampling(top_p=math.nan), "sampling.top_p"),
    (sampling(top_p=-math.inf), "sampling.top_p"),
    (sampling(top_k=-1), "sampling.top_k"),
    (sampling(min_p=-0.01), "sampling.min_p"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(min_p=math.nan), "sampling.min_p"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=-1.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=math.inf), "sampling.repetition_penalty"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    (sampling(presence_penalty=math.nan), "sampling.presence_penalty"),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    (sampling(frequency_penalty=math.inf), "sampling.frequency_penalty"),
    (sampling(logprobs=-1), "sampling.logprobs"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(verification=3), "sampling.verification"),
    (sampling(verification=-1), "sampling.verification"),
    (sampling(stop_token_ids=[-1]), "sampling.stop_token_ids[0]"),
    (sampling(stop_token_ids=[1, 1000]), "sampling.stop_token_ids[1]"),
    (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids"),
    # Names and ids.
    ({"prompt": "Hi", "request_id": "x" * 129}, "request_id"),
    ({"prompt": "Hi", "request_id": "a b"}, "request_id"),
    ({"prompt": "Hi", "request_id": "ä"}, "request_id"),
    ({"prompt": "Hi", "request_id": "a\nb"}, "request_id"),
    ({"prompt": "Hi", "request_id": "a\x00"}, "request_id"),
    # Stop strings, choices.
    ({"prompt": "Hi", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "Hi", "stop": ["x", ""]}, "stop[1]"),
    ({"prompt": "Hi", "stop": ["x" * 257]}, "stop[0]"),
    ({"prompt": "Hi", "stop": ["x", "y", "é" * 129]}, "stop[2]"),
    ({"prompt": "Hi", "n": 0}, "n"),
    ({"prompt": "Hi", "n": -1}, "n"),
    ({"prompt": "Hi", "n": 9}, "n"),
    # What this server does not have.
    ({"input_ids": [1], "echo": True}, "echo"),
    ({**chat(("user", "Hi")), "echo": True}, "echo"),
    ({"prompt": "Hi", "return_token_text": True}, "return_token_text"),
]

RAW_CASES: list[tuple[bytes, str]] = [
    (b"\xff\xff\xff\xff", "request"),
    (b"\x1a\x05Hi", "request"),  # a prompt that is cut off
    (b"\x1a\x02\xff\xfe", "request"),  # a prompt that is not UTF-8
    (b"\x22\x04\x0a\x02\xc3\x28", "request"),  # a role that is not UTF-8
    (b"\x0b", "request"),  # a group without an end
    (b"not a message at all", "request"),
    (b"\x18\x01", "prompt"),  # a number as the prompt
    (b"\x1a\x02Hi\x3a\x01x", "max_tokens"),  # text as the token limit
    (b"\x1a\x02Hi\x42\x02\x08\x01", "sampling.temperature"),  # an integer as the temperature
    (b"\x1a\x02Hi\x42\x02\x40\x01\x4d\x01\x00\x00\x00", "max_draft_len"),  # fixed32 for a varint
    (b"\x22\x05\x0a\x01u\x10\x07", "messages[0].content"),  # a number as the content
]


@pytest.mark.parametrize(
    ("fields", "field"), CASES, ids=[f"{n}-{c[1]}" for n, c in enumerate(CASES)]
)
async def test_is_refused_by_name(
    client: Client, triton: FakeTriton, fields: dict[str, Any], field: str
) -> None:
    outcome = await client.generate(**fields)
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome.bad_fields == [field]
    assert outcome.message.startswith(f"{field}: got ")
    assert "allowed: " in outcome.message
    assert len(outcome.message) < 400
    assert triton.generations == []
    assert (await client.generate(prompt="Hi")).text == "Hello world"


async def test_a_verification_that_there_is_not_is_shown_those_that_there_are(
    client: Client,
) -> None:
    outcome = await client.generate(**sampling(verification=3))
    assert outcome.message == (
        "sampling.verification: got 3, allowed: "
        "VERIFICATION_UNSPECIFIED, VERIFICATION_REJECTION, VERIFICATION_COUPLED"
    )


@pytest.mark.parametrize(("content", "field"), RAW_CASES)
async def test_wrong_bytes_are_refused_by_name(
    client: Client, triton: FakeTriton, content: bytes, field: str
) -> None:
    outcome = await client.generate_raw(content)
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome.bad_fields == [field]
    assert triton.generations == []
    assert (await client.generate(prompt="Hi")).text == "Hello world"


@pytest.mark.parametrize(
    "path",
    [
        *("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_wrong_bytes_are_the_callers_fault_in_standard_services_too(
    client: Client, path: str
) -> None:
    call = client.channel.stream_stream(path)()
    await call.write(b"\x0a\x02\xff\xfe")
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await call.details()).startswith("request: got bytes that are no such message")


async def test_unknown_fields_of_a_newer_client_are_let_through(client: Client) -> None:
    content = pb.GenerateRequest(prompt="Hi").SerializeToString() + b"\xc0\x3e\x01"  # field 1000
    assert (await client.generate_raw(content)).text == "Hello world"


@pytest.mark.parametrize("name", ["other", "Test-Model", "x" * 5000, "ensemble", "../engine"])
async def test_an_unknown_model_is_not_found(client: Client, name: str) -> None:
    outcome = await client.generate(prompt="Hi", model=name)
    assert outcome.code is grpc.StatusCode.NOT_FOUND
    assert outcome.message.startswith("model: ")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.get_model(name)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await client.generate(prompt="Hi", model=MODEL)).text == "Hello world"


async def test_messages_need_a_chat_template(triton: FakeTriton, client: Client) -> None:
    triton.description = {**DESCRIPTION, "has_chat_template": False}
    triton.server_ready = False
    await client.wait_serving(False)
    triton.server_ready = True
    await client.wait_serving()
    outcome = await client.generate(**chat(("user", "Hi")))
    assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
    assert outcome.bad_fields == ["messages"]


async def test_prompts_are_never_shown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for fields in (
        {"prompt": "s3cret" * 200_000},
        {"prompt": "s3cret", "input_ids": [1]},
        chat(("user", "s3cret"), ("nobody", "s3cret")),
    ):
        outcome = await client.generate(**fields)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "s3cret" not in outcome.message
    assert "s3cret" not in caplog.text


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=st.binary(max_size=200))
def test_no_bytes_break_the_decoder(content: bytes) -> None:
    """Whatever comes is a message or an error value, never an exception."""
    decoded = decoding(pb.GenerateRequest.FromString)(content)
    assert isinstance(decoded, pb.GenerateRequest | DraftgateError)
