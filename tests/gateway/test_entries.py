"""The same answers whether generations enter at the ensemble or straight at the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.text import Tokenizer
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import Client, connected, running_gateway

TEXT = "Grüße 🙂, said the fox. END and more"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(params=["ensemble", "engine"])
async def entered(
    request: pytest.FixtureRequest, triton: FakeTriton, folder: Path
) -> AsyncIterator[Client]:
    """A client of a gateway that enters there."""
    async with (
        running_gateway(triton.target, entry=request.param, tokenizer_dir=folder) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client


def spoken(tokenizer: Tokenizer, text: str, *, size: int = 3, **script: Any) -> Script:
    """Steps that say it in so many tokens each, of which all but the last were drafted."""
    ids = tokenizer.encode_prompt(text)
    steps = []
    for start in range(0, len(ids), size):
        new, before = ids[start : start + size], ids[:start]
        last = start + size >= len(ids)
        context = before[tokenizer.context_start(before) :]
        values = {
            "output_ids": new,
            "text_output": tokenizer.delta(context, new, final=last),
            "draft_lens": [size],
            "accepted_lens": [len(new) - 1],
            "draft_source": [1],
        }
        steps.append(Step(values))
    return Script(steps, **script)


async def test_text_comes_as_it_was_said(
    entered: Client, triton: FakeTriton, tokenizer: Tokenizer
) -> None:
    triton.default = spoken(tokenizer, TEXT)
    for prompt in (
        {"prompt": "Hi"},
        {"messages": [pb.ChatMessage(role="user", content="Hi")]},
        {"input_ids": [1, 2]},
    ):
        outcome = await entered.generate(**prompt, return_token_text=True)
        assert outcome.code is grpc.StatusCode.OK, outcome.message
        assert outcome.text == TEXT
        assert "".join(token.text for token in outcome.tokens) == TEXT
        assert all("\ufffd" not in chunk.text for chunk in outcome.chunks)


async def test_a_stop_string_ends_it_across_chunks(
    entered: Client, triton: FakeTriton, tokenizer: Tokenizer
) -> None:
    triton.default = spoken(tokenizer, TEXT, size=2)
    outcome = await entered.generate(prompt="Hi", stop=["END"])
    assert outcome.text == TEXT.partition("END")[0]
    assert outcome.finished.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert outcome.finished.stop_string == "END"


async def test_acceptance_is_counted_alike(
    entered: Client, triton: FakeTriton, tokenizer: Tokenizer
) -> None:
    triton.default = spoken(tokenizer, "abcdef")
    outcome = await entered.generate(prompt="Hi")
    assert outcome.finished.speculation == pb.Speculation(
        verify_steps=2,
        drafted_tokens=6,
        accepted_tokens=4,
        acceptance_rate=4 / 6,
        mean_acceptance_length=3.0,
    )


async def test_leaving_stops_it(entered: Client, triton: FakeTriton, tokenizer: Tokenizer) -> None:
    step = Step({"output_ids": tokenizer.encode_prompt("x"), "text_output": "x"}, delay_s=0.005)
    triton.default = Script([step], endless=True)
    call = entered.generation.Generate(pb.GenerateRequest(prompt="Hi"))
    await call.read()
    await call.read()
    call.cancel()
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])


async def test_many_at_once(entered: Client, triton: FakeTriton, tokenizer: Tokenizer) -> None:
    triton.default = spoken(tokenizer, TEXT)
    outcomes = await asyncio.gather(*(entered.generate(prompt="Hi") for _ in range(16)))
    assert {outcome.text for outcome in outcomes} == {TEXT}


async def test_an_entry_that_is_not_there_is_told(triton: FakeTriton) -> None:
    async with (
        running_gateway(triton.target, entry="nonsense") as gateway,
        connected(gateway) as client,
        asyncio.timeout(30),
    ):
        while "it has no model nonsense" not in (await client.replicas())[triton.target].reason:
            await asyncio.sleep(0.01)
