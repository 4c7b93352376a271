"""The repository's text models in a real tritonserver, alone and around a decoupled engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from draftgate.errors import DraftgateError, ErrorCode, from_wire
from draftgate.sampling import SamplingParams
from draftgate.text import Message, Tokenizer
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig
from draftgate.upstream.types import GenerationRequest, TextPrompt, TokenPrompt
from tests.support.infer import InferError, infer, stream_infer

pytestmark = [pytest.mark.triton, pytest.mark.asyncio(loop_scope="module")]

REPOSITORY = Path(__file__).parents[2] / "model_repository"

TEXT = "Grüße 🙂👩‍👩‍👧‍👦 and 日本語 e\u0301. " * 8

# Stands in for the engine alone: it answers with the ids of the prompt, one response each.
PARROT = """
import os
import sys

sys.path[:0] = os.environ["DRAFTGATE_PYTHONPATH"].split(os.pathsep)

from draftgate.backend.environment import model_dir
from draftgate.backend.tensors import Inputs, load_pb_utils, response
from draftgate.contract import ENGINE_INPUTS, ENGINE_OUTPUTS
from draftgate.text import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        self.pb_utils = load_pb_utils()
        self.tokenizer = Tokenizer.load(model_dir())

    def execute(self, requests):
        for request in requests:
            ids = Inputs(self.pb_utils, request, ENGINE_INPUTS).integers("input_ids")
            sender = request.get_response_sender()
            wanted = request.requested_output_names()
            for index, token in enumerate(ids):
                values = {
                    "output_ids": [token],
                    "context_ids": ids[self.tokenizer.context_start(ids[:index]) : index],
                    "chunk_index": index,
                    "finish_reason": "",
                }
                sender.send(response(self.pb_utils, ENGINE_OUTPUTS, values, wanted))
            values = {
                "context_ids": ids[self.tokenizer.context_start(ids) :],
                "chunk_index": len(ids),
                "finish_reason": "length",
            }
            sender.send(
                response(self.pb_utils, ENGINE_OUTPUTS, values, wanted),
                flags=self.pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
"""


@pytest.fixture
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TritonServer]:
    """The model repository with the parrot in the engine's place."""
    repository = tmp_path_factory.mktemp("parrot") / "repository"
    shutil.copytree(REPOSITORY, repository)
    (repository / "engine" / "1" / "model.py").write_text(PARROT)
    server = TritonServer(TritonServerConfig(repository, checkpoint_dir, exit_timeout_s=2))
    await server.start()
    yield server
    await server.stop()


def words(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def stream(target: str, **inputs: np.ndarray) -> list[tuple[int, str]]:
    """The chunk index and text of each response of the ensemble, in the order of arrival."""
    return [
        (int(answer["chunk_index"][0]), answer["text_output"][0].decode())
        for answer in stream_infer(target, "ensemble", inputs)
    ]


async def test_text_through_real_models(server: TritonServer, tokenizer: Tokenizer) -> None:
    target = server.grpc_target
    emitted = tokenizer.encode_prompt(TEXT)

    def ask(model: str, output: str, **inputs: np.ndarray) -> Any:
        return infer(target, model, inputs)[output]

    def ask_all() -> None:
        got = ask("preprocessing", "input_ids", text_input=words(TEXT))
        assert got.tolist() == emitted
        messages = json.dumps([{"role": "user", "content": TEXT}])
        got = ask("preprocessing", "input_ids", messages=words(messages))
        assert got.tolist() == tokenizer.encode_chat([Message("user", TEXT)])
        got = ask("preprocessing", "input_ids", input_ids=ids(7, 8))
        assert got.tolist() == [7, 8]

        smile = tokenizer.encode_prompt("🙂")
        for finish_reason, expected in (("", ""), ("eos", "\ufffd")):
            got = ask(
                "postprocessing",
                "text_output",
                output_ids=ids(),
                context_ids=ids(*smile[:-1]),
                finish_reason=words(finish_reason),
            )
            assert got[0].decode() == expected

        for inputs, field in (
            ({}, "text_input"),
            ({"text_input": words("x"), "messages": words("[]")}, "text_input"),
            ({"messages": words("{}")}, "messages"),
        ):
            with pytest.raises(InferError) as caught:
                ask("preprocessing", "input_ids", **inputs)
            error = from_wire(str(caught.value))
            assert error is not None
            assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, field)

    await asyncio.to_thread(ask_all)


async def test_an_ensemble_streams_exact_text_in_order(
    server: TritonServer, tokenizer: Tokenizer
) -> None:
    count = len(tokenizer.encode_prompt(TEXT))
    streams = [
        asyncio.to_thread(stream, server.grpc_target, text_input=words(TEXT), max_tokens=ids(count))
        for _ in range(4)
    ]
    for chunks in await asyncio.gather(*streams):
        assert [index for index, _ in chunks] == list(range(count + 1))
        assert "".join(text for _, text in chunks) == TEXT


async def test_the_engine_entered_straight_gives_the_same_text(
    server: TritonServer, tokenizer: Tokenizer
) -> None:
    emitted = tokenizer.encode_prompt(TEXT)
    sampling = SamplingParams(max_tokens=len(emitted))
    for prompt in (TextPrompt(TEXT), TokenPrompt(tuple(emitted))):
        outcomes = []
        for entry in ("ensemble", "engine"):
            client = TritonClient(
                TritonClientConfig(server.grpc_target, entry_model=entry), tokenizer
            )
            await client.find_profile(10.0)
            assert client.profile.entry == entry
            request = GenerationRequest("abc", prompt, sampling)
            async with client.generate(request).started() as chunks:
                outcomes.append([(chunk.text, chunk.token_ids) async for chunk in chunks])
            await client.close()
        at_ensemble, at_engine = outcomes
        assert at_engine == at_ensemble
        assert "".join(text for text, _ in at_engine) == TEXT


@pytest.mark.parametrize("entry", ["ensemble", "engine"])
async def test_a_prompt_without_tokens_is_refused_alike(
    server: TritonServer, tokenizer: Tokenizer, entry: str
) -> None:
    client = TritonClient(TritonClientConfig(server.grpc_target, entry_model=entry), tokenizer)
    await client.find_profile(10.0)
    request = GenerationRequest("abc", TextPrompt(""), SamplingParams(max_tokens=1))
    with pytest.raises(DraftgateError) as caught:
        async with client.generate(request).started() as chunks:
            await anext(chunks)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "text_input")
    assert "at least one token" in caught.value.message
    await client.close()


async def test_a_bad_prompt_is_told_through_the_ensemble(server: TritonServer) -> None:
    with pytest.raises(InferError) as caught:
        await asyncio.to_thread(
            stream, server.grpc_target, messages=words('[{"role": "user"}]'), max_tokens=ids(1)
        )
    error = from_wire(str(caught.value))
    assert error is not None
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "messages[0].content")


async def test_a_wrong_checkpoint_fails_the_start_with_one_line(
    tmp_path: Path,
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copytree(REPOSITORY / "preprocessing", repository / "preprocessing")
    server = TritonServer(TritonServerConfig(repository, tmp_path / "nowhere"))
    with pytest.raises(DraftgateError) as caught:
        await server.start()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    missing = tmp_path / "nowhere" / "tokenizer.json"
    assert caught.value.message == f"cannot read {missing}: No such file or directory"
