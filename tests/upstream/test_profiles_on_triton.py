"""Foreign model repositories behind the gateway: a real tritonserver loads the public tensor
tables, and small Python models stand in for the engines."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.upstream.tritonserver import TritonServer, TritonServerConfig
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import Client, connected, running_gateway

pytestmark = [pytest.mark.triton, pytest.mark.asyncio(loop_scope="module")]

REPOSITORIES = Path(__file__).parents[1] / "data" / "repositories"


@dataclass
class StandIn:
    """A running tritonserver with one of the repositories."""

    target: str
    events_file: Path

    def events(self) -> list[dict[str, Any]]:
        """What its engine noted so far."""
        return [json.loads(line) for line in self.events_file.read_text().splitlines()]

    def asked(self) -> dict[str, Any]:
        """The inputs of the last generation beside its prompt."""
        found: dict[str, Any] = [each["asked"] for each in self.events() if "asked" in each][-1]
        return found

    async def ends(self, word: str, count: int) -> None:
        """Wait until that many generations ended in this way."""
        async with asyncio.timeout(20):
            while self.events().count({"ended": word}) < count:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def running(folder: Path, repository: str) -> AsyncIterator[StandIn]:
    shutil.copytree(REPOSITORIES / repository, folder / repository)
    server = TritonServer(TritonServerConfig(folder / repository, folder, exit_timeout_s=2))
    await server.start()
    try:
        events_file = folder / repository / "tensorrt_llm" / "events.jsonl"
        yield StandIn(server.grpc_target, events_file)
    finally:
        await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def inflight(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandIn]:
    async with running(tmp_path_factory.mktemp("inflight"), "inflight_batcher_llm") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llmapi(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StandIn]:
    async with running(tmp_path_factory.mktemp("llmapi"), "llmapi") as found:
        yield found


@asynccontextmanager
async def in_front_of(
    stand_in: StandIn, model: str | None = None, **config: Any
) -> AsyncIterator[Client]:
    """A client of a gateway that sends generations to `model`."""
    async with (
        running_gateway(stand_in.target, entry=model, **config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client


def script(*words: str | list[int], **fields: Any) -> str:
    """The prompt that makes a stand-in answer so; a word may be given as its bytes."""
    return json.dumps({"words": words, **fields})


async def test_conversations_in_front_of_the_ensemble(inflight: StandIn, tmp_path: Path) -> None:
    await converse(inflight, tmp_path)


async def test_conversations_in_front_of_llmapi(llmapi: StandIn, tmp_path: Path) -> None:
    await converse(llmapi, tmp_path)


async def converse(stand_in: StandIn, tmp_path: Path) -> None:
    """Messages go through the gateway's chat template, which says what the first of them says."""
    folder = write_byte_tokenizer(tmp_path / "model")
    asked: dict[str, Any] = {
        "messages": [pb.ChatMessage(role="user", content=script("He", "llo"))],
        "max_tokens": 50,
    }
    async with in_front_of(stand_in, tokenizer_dir=folder) as client:
        outcome = await client.generate(**asked)
        assert (outcome.error, outcome.text) == (None, "Hello")
        assert (await client.get_model()).has_chat_template
    async with in_front_of(stand_in) as client:
        outcome = await client.generate(**asked)
        assert outcome.code is grpc.StatusCode.FAILED_PRECONDITION
        assert outcome.message.startswith("messages: the models behind this gateway have no chat")


async def test_the_ensemble_of_engines(inflight: StandIn) -> None:
    async with in_front_of(inflight) as client:
        outcome = await client.generate(
            prompt=script("He", "llo", " world"),
            max_tokens=50,
            sampling=pb.SamplingParameters(
                temperature=0.5, top_k=7, seed=2**63, repetition_penalty=1.5
            ),
        )
        assert outcome.error is None
        assert outcome.text == "Hello world"
        assert outcome.finished.finish_reason == pb.FINISH_REASON_EOS
        usage = outcome.finished.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (
            len(script("He", "llo", " world")),
            11,
        )
        assert not usage.HasField("cached_tokens")
        # Three tokens at once and then six, by an engine built to speculate: two and five drafts.
        speculation = outcome.finished.speculation
        assert (speculation.accepted_tokens, speculation.verify_steps) == (7, 2)
        assert speculation.derived
        assert not speculation.HasField("drafted_tokens")
    asked = inflight.asked()
    assert asked["streaming"] is True
    assert asked["exclude_input_in_output"] is True
    assert (asked["temperature"], asked["runtime_top_k"], asked["runtime_top_p"]) == (0.5, 7, 1.0)
    assert (asked["seed"], asked["repetition_penalty"]) == (2**63, 1.5)


async def test_acceptance_that_an_engine_reports(inflight: StandIn) -> None:
    metrics = {"total_draft_tokens": 8, "total_accepted_draft_tokens": 2, "acceptance_rate": 0.25}
    for model in (None, "tensorrt_llm_bls"):
        async with in_front_of(inflight, model) as client:
            outcome = await client.generate(prompt=script("a", "b", metrics=metrics), max_tokens=2)
        assert outcome.finished.finish_reason == pb.FINISH_REASON_LENGTH
        speculation = outcome.finished.speculation
        assert (speculation.drafted_tokens, speculation.accepted_tokens) == (8, 2)
        assert speculation.acceptance_rate == 0.25
        assert not speculation.derived
        assert not speculation.HasField("verify_steps")


async def test_the_end_may_be_a_flag_alone(inflight: StandIn) -> None:
    async with in_front_of(inflight) as client:
        outcome = await client.generate(prompt=script("a", "b", flag_alone=True), max_tokens=9)
    assert (outcome.text, outcome.error) == ("ab", None)
    assert outcome.finished.finish_reason == pb.FINISH_REASON_EOS


async def test_bls_accumulates_characters(inflight: StandIn) -> None:
    smile = list("🙂".encode())
    async with in_front_of(inflight, "tensorrt_llm_bls") as client:
        outcome = await client.generate(prompt=script("a", smile[:2], smile[2:], "b"))
    assert outcome.text == "a🙂b"
    assert [chunk.text for chunk in outcome.chunks] == ["a", "🙂", "b"]


async def test_the_engine_alone_takes_and_gives_ids(inflight: StandIn) -> None:
    async with in_front_of(inflight, "tensorrt_llm") as client:
        ids = list(script([1, 2], [3]).encode())
        outcome = await client.generate(input_ids=ids, max_tokens=3)
        assert [token.id for token in outcome.tokens] == [1, 2, 3]
        assert outcome.finished.usage.output_tokens == 3
        assert outcome.finished.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("model", [None, "tensorrt_llm_bls"])
async def test_leaving_stops_the_engine(inflight: StandIn, model: str | None) -> None:
    stopped = inflight.events().count({"ended": "stopped"})
    async with in_front_of(inflight, model) as client:
        request = pb.GenerateRequest(
            prompt=script("x", endless=True, delay_s=0.02), max_tokens=100_000
        )
        call = client.generation.Generate(request)
        await call.read()
        call.cancel()
        await inflight.ends("stopped", stopped + 1)


async def test_an_engines_error_is_internal_and_not_repeated(inflight: StandIn) -> None:
    async with in_front_of(inflight) as client:
        outcome = await client.generate(prompt=script(error="assertion in /secret/place.cpp"))
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert outcome.message == "the model server failed"


async def test_llmapi_sends_the_whole_text_and_numbers_as_text(llmapi: StandIn) -> None:
    smile = list("🙂".encode())
    metrics = {
        "acceptance_rate": 0.75,
        "total_accepted_draft_tokens": 3,
        "total_draft_tokens": 4,
    }
    async with in_front_of(llmapi) as client:
        outcome = await client.generate(
            prompt=script(
                "Hello", " ", smile[:3], smile[3:], metrics=metrics, finish_reason="stop"
            ),
            max_tokens=50,
            sampling=pb.SamplingParameters(temperature=0.0, presence_penalty=0.5),
        )
        assert outcome.error is None
        assert outcome.text == "Hello 🙂"
        assert outcome.finished.finish_reason == pb.FINISH_REASON_EOS
        speculation = outcome.finished.speculation
        assert (speculation.drafted_tokens, speculation.accepted_tokens) == (4, 3)
        assert not outcome.finished.usage.HasField("output_tokens")
        assert not outcome.events[0].started.HasField("prompt_tokens")
        asked = llmapi.asked()
        assert asked["sampling_param_top_k"] == 1
        assert asked["sampling_param_max_tokens"] == 50
        assert asked["sampling_param_presence_penalty"] == 0.5
        assert asked["streaming"] is True
        zero = await client.generate(
            prompt=script("a", metrics=dict.fromkeys(metrics, 0), finish_reason="length")
        )
        assert zero.finished.finish_reason == pb.FINISH_REASON_LENGTH
        assert not zero.finished.HasField("speculation")


async def test_llmapi_is_left_by_cancelling(llmapi: StandIn) -> None:
    async with in_front_of(llmapi) as client:
        request = pb.GenerateRequest(prompt=script("x", endless=True, delay_s=0.02))
        call = client.generation.Generate(request)
        await call.read()
        call.cancel()
        await llmapi.ends("cancelled", 1)


async def test_llmapi_errors_do_not_become_text(llmapi: StandIn) -> None:
    async with in_front_of(llmapi) as client:
        outcome = await client.generate(prompt=script(error="out of blocks"))
    assert outcome.code is grpc.StatusCode.INTERNAL
    assert outcome.events == []


async def test_what_foreign_models_cannot_do_is_said(llmapi: StandIn) -> None:
    async with in_front_of(llmapi) as client:
        model = await client.get_model()
        assert not model.HasField("vocab_size")
        assert not model.has_chat_template
        outcome = await client.generate(prompt="Hi", sampling=pb.SamplingParameters(min_p=0.5))
        assert outcome.code is grpc.StatusCode.UNIMPLEMENTED
        assert outcome.message.startswith("sampling.min_p: the models behind this gateway (llmapi)")
        outcome = await client.generate(input_ids=[1])
        assert outcome.message.startswith("input_ids: ")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.gate.GetState(gate_pb2.GetStateRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
