"""What a request gets for what it leaves out, and how much it may ask for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import model_pb2
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import GatewayConfig, convert
from draftgate.gateway.defaults import RequestDefaults
from draftgate.gateway.validate import check_generation
from draftgate.sampling import SamplingParams
from draftgate.upstream.types import EngineDescription
from tests.fakes.triton import DESCRIPTION, FakeTriton
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import Client, connected, running_gateway


@asynccontextmanager
async def client_of(triton: FakeTriton, **config: Any) -> AsyncIterator[Client]:
    async with running_gateway(triton.target, **config) as gateway, connected(gateway) as client:
        await client.wait_serving()
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_byte_tokenizer(tmp_path / "model")


def write(folder: Path, **values: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_without_any_they_are_those_of_the_engine() -> None:
    assert RequestDefaults().sampling == SamplingParams(max_tokens=256)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
    ],
)
def test_they_have_the_ranges_of_requests(name: str, value: float) -> None:
    with pytest.raises(DraftgateError, match=rf"^defaults\.{name}: got .*, allowed: ") as caught:
        RequestDefaults(**{name: value})  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.field) == (
        ErrorCode.INVALID_ARGUMENT,
        f"defaults.{name}",
    )


def test_the_models_own_fill_what_is_not_given(folder: Path) -> None:
    write(folder, max_new_tokens=64, temperature=0.6, top_p=0.9, top_k=40, eos_token_id=[1, 2])
    found = RequestDefaults(top_p=0.5, generation_config=True).completed(folder)
    assert found.sampling == SamplingParams(max_tokens=64, temperature=0.6, top_p=0.5, top_k=40)


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": None}, 1.0),
        ({}, 1.0),
    ],
)
def test_greedy_is_what_says_so(folder: Path, values: dict[str, Any], temperature: float) -> None:
    found = RequestDefaults(generation_config=True).completed(write(folder, **values))
    assert found.sampling.temperature == temperature


def test_a_model_without_such_a_file_has_no_defaults(folder: Path) -> None:
    asked = RequestDefaults(temperature=0.3, generation_config=True)
    assert asked.completed(folder) == asked


def test_the_file_counts_only_where_it_is_asked_for(folder: Path) -> None:
    write(folder, temperature=0.6)
    assert RequestDefaults().completed(folder) == RequestDefaults()


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": 500}, r"generation_config\.json: temperature: got 500, allowed: a finite"),
        ({"max_new_tokens": 0}, r"generation_config\.json: max_tokens: got 0, allowed: an integer"),
        ({"top_k": "many"}, r"generation_config\.json: top_k is no such number"),
        ({"top_k": 1.5}, r"generation_config\.json: top_k is no such number"),
        ({"min_p": True}, r"generation_config\.json: min_p is no such number"),
    ],
)
def test_a_file_that_is_of_no_use_is_named(
    folder: Path, values: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DraftgateError, match=problem):
        RequestDefaults(generation_config=True).completed(write(folder, **values))


async def test_a_file_needs_its_folder(triton: FakeTriton) -> None:
    with pytest.raises(DraftgateError) as caught:
        async with running_gateway(triton.target, defaults=RequestDefaults(generation_config=True)):
            pass
    assert caught.value.field == "defaults.generation_config"


async def test_what_is_left_out_is_filled_in_and_what_is_given_stands(
    triton: FakeTriton, folder: Path
) -> None:
    write(folder, temperature=0.5, top_k=40)
    defaults = RequestDefaults(
        max_tokens=9, repetition_penalty=1.25, presence_penalty=0.5, generation_config=True
    )
    filled = {
        "max_tokens": [9],
        "temperature": [0.5],
        "top_k": [40],
        "repetition_penalty": [1.25],
        "presence_penalty": [0.5],
    }
    async with client_of(triton, defaults=defaults, tokenizer_dir=folder) as client:
        await client.generate(prompt="Hi")
        assert triton.generations[0].tensors == {"text_input": "Hi", **filled}
        sampling = pb.SamplingParameters(temperature=0.0, top_k=0, presence_penalty=0.0, seed=3)
        await client.generate(prompt="Hi", max_tokens=4, sampling=sampling)
        assert triton.generations[1].tensors == {
            "text_input": "Hi",
            "max_tokens": [4],
            "temperature": [0.0],
            "repetition_penalty": [1.25],
            "seed": [3],
        }
        told = (await client.get_model()).defaults
        assert told.max_tokens == 9
        assert told.sampling == pb.SamplingParameters(
            temperature=0.5,
            top_p=1.0,
            top_k=40,
            min_p=0.0,
            repetition_penalty=1.25,
            presence_penalty=0.5,
            frequency_penalty=0.0,
        )


NUMBERS: dict[str, st.SearchStrategy[float]] = {
    "max_tokens": st.integers(1, 512),
    "temperature": st.floats(0.0, 100.0, width=32),
    "top_p": st.floats(0.5, 1.0, width=32),
    "top_k": st.integers(0, 100),
    "min_p": st.floats(0.0, 1.0, width=32),
    "repetition_penalty": st.floats(0.5, 2.0, width=32),
    "presence_penalty": st.floats(-2.0, 2.0, width=32),
    "frequency_penalty": st.floats(-2.0, 2.0, width=32),
}
SOME = st.fixed_dictionaries({}, optional=NUMBERS)


@given(default=SOME, asked=SOME)
def test_the_callers_word_goes_before_the_servers(
    default: dict[str, Any], asked: dict[str, Any]
) -> None:
    sampling = {name: value for name, value in asked.items() if name != "max_tokens"}
    request = pb.GenerateRequest(
        prompt="Hi",
        max_tokens=asked.get("max_tokens"),
        sampling=pb.SamplingParameters(**sampling),
    )
    config = GatewayConfig("t:1", "m", defaults=RequestDefaults(**default))
    engine = EngineDescription.from_json(json.dumps(DESCRIPTION))
    call = check_generation(convert.generation_input(request), config, engine, deadline_ms=None)
    wanted = SamplingParams(**{"max_tokens": 256, **default, **asked})
    assert call.request.sampling == wanted


async def test_the_server_has_its_own_limits(triton: FakeTriton) -> None:
    async with client_of(
        triton, max_output_tokens=20, max_prompt_tokens=3, max_prompt_bytes=50, max_choices=2
    ) as client:
        assert (await client.generate(prompt="Hi")).error is None
        assert triton.generations[0].tensors["max_tokens"] == [20]
        refused: list[tuple[dict[str, Any], str, str]] = [
            (
                {"prompt": "Hi", "max_tokens": 21},
                "max_tokens",
                "max_tokens: got 21, allowed: an integer from 1 to 20",
            ),
            (
                {"prompt": "x" * 13},
                "prompt",
                "prompt: got '4 tokens', allowed: at most 3 tokens",
            ),
            (
                {"input_ids": [1, 2, 3, 4]},
                "input_ids",
                "input_ids: got '4 tokens', allowed: at most 3 tokens",
            ),
            (
                {"messages": [pb.ChatMessage(role="user", content="x")] * 2},
                "messages",
                "messages: got '10 tokens', allowed: at most 3 tokens",
            ),
            (
                {"prompt": "x" * 51},
                "prompt",
                "prompt: got '51 bytes', allowed: at most 50 bytes of UTF-8",
            ),
            ({"prompt": "Hi", "n": 3}, "n", "n: got 3, allowed: an integer from 1 to 2"),
        ]
        for request, field, message in refused:
            outcome = await client.generate(**request)
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (outcome.bad_fields, outcome.message) == ([field], message)
        assert (await client.generate(prompt="x" * 12)).error is None
        # What was emitted already is output, not prompt.
        resumed = await client.generate(input_ids=[1, 2, 3, 4], resume_len=1)
        assert resumed.error is None
        model = await client.get_model()
        assert model.defaults.max_tokens == 20
        assert model.limits == model_pb2.GenerationLimits(
            max_output_tokens=20,
            max_prompt_tokens=3,
            max_prompt_bytes=50,
            max_messages=1024,
            max_choices=2,
        )


async def test_what_is_not_limited_is_not_told(client: Client) -> None:
    limits = (await client.get_model()).limits
    assert not limits.HasField("max_output_tokens")
    assert not limits.HasField("max_prompt_tokens")
    assert (limits.max_prompt_bytes, limits.max_choices) == (2**20, 8)
