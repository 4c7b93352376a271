"""A replica that is lost costs a generation nothing: not a token, not a character."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from draftgate.text import Tokenizer
from draftgate.upstream.replica import ReplicaLimits
from draftgate.upstream.replicas import ReplicaSetConfig
from draftgate.upstream.resume import ResumeLimits
from tests.fakes.speaker import Speaker
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.gateway import Client, Outcome, connected, running_gateway

PROMPT = "Grüße 你"
TOKENS = 40

LOST = [
    {"status": grpc.StatusCode.UNAVAILABLE, "details": "Socket closed"},
    {"status": grpc.StatusCode.INTERNAL, "details": "Received RST_STREAM with error code 2"},
    {"status": grpc.StatusCode.UNKNOWN, "details": "Stream removed"},
    {"in_band_error": "Server exiting"},
    {"in_band_error": "Stub process 'engine_0' is not healthy."},
    {"in_band_error": to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "the engine failed"))},
]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def speaker(tokenizer_dir: Path) -> Speaker:
    return Speaker(Tokenizer.load(tokenizer_dir))


@asynccontextmanager
async def fakes(speaker: Speaker, count: int = 2) -> AsyncIterator[list[FakeTriton]]:
    """Fake Tritons that speak alike."""
    found = [FakeTriton() for _ in range(count)]
    speaker.speak_through(*found)
    for triton in found:
        await triton.start()
    yield found
    for triton in found:
        with contextlib.suppress(Exception):  # The test may have stopped it.
            await triton.stop()


@asynccontextmanager
async def client_of(*tritons: FakeTriton, **config: Any) -> AsyncIterator[Client]:
    targets = ",".join(triton.target for triton in tritons)
    async with running_gateway(targets, **config) as gateway, connected(gateway) as client:
        await client.wait_serving()
        yield client


def asked(speaker: Speaker, kind: str = "prompt") -> dict[str, Any]:
    prompts: dict[str, Any] = {
        "prompt": PROMPT,
        "messages": [pb.ChatMessage(role="user", content=PROMPT)],
        "input_ids": speaker.tokenizer.encode_prompt(PROMPT),
    }
    return {kind: prompts[kind], "max_tokens": TOKENS, "return_token_text": True}


def check_undisturbed(outcome: Outcome, speaker: Speaker, *, resumes: int) -> None:
    ids, text = speaker.answer(speaker.tokenizer.encode_prompt(PROMPT), TOKENS)
    assert outcome.code is grpc.StatusCode.OK, outcome.message
    assert [token.id for token in outcome.tokens] == ids
    assert outcome.text == text
    assert "".join(token.text for token in outcome.tokens) == text
    assert outcome.kinds == ["started", *["tokens"] * (len(outcome.kinds) - 2), "finished"]
    started, finished = outcome.events[0].started, outcome.finished
    assert started.prompt_tokens == len(speaker.tokenizer.encode_prompt(PROMPT))
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == started.prompt_tokens
    assert finished.usage.output_tokens == TOKENS
    assert finished.resumes == resumes


@pytest.mark.parametrize("how", LOST)
@pytest.mark.parametrize("kind", ["prompt", "messages", "input_ids"])
@pytest.mark.parametrize("entry", ["ensemble", "engine"])
async def test_a_replica_lost_at_any_step_costs_nothing(
    speaker: Speaker, tokenizer_dir: Path, kind: str, how: dict[str, Any], entry: str
) -> None:
    async with (
        fakes(speaker) as found,
        client_of(*found, tokenizer_dir=tokenizer_dir, entry=entry) as client,
    ):
        for after in range(12):
            speaker.faults = [Speaker.failing(after, **how)]
            outcome = await client.generate(**asked(speaker, kind))
            check_undisturbed(outcome, speaker, resumes=1)
        assert len(speaker.asked) == 24


async def test_what_is_asked_again_is_the_rest_alone(speaker: Speaker, tokenizer_dir: Path) -> None:
    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        speaker.faults = [Speaker.failing(4, in_band_error="Server exiting")]
        sampling = pb.SamplingParameters(temperature=0.7, seed=5, top_k=9)
        outcome = await client.generate(**asked(speaker), sampling=sampling, timeout=60)
        check_undisturbed(outcome, speaker, resumes=1)
        first, second = (received.tensors for received in speaker.asked)
        emitted = sum(len(chunk.tokens) for chunk in outcome.chunks[:4])
        prompt = speaker.tokenizer.encode_prompt(PROMPT)
        ids, _ = speaker.answer(prompt, TOKENS)
        assert second["input_ids"] == [*prompt, *ids[:emitted]]
        assert second["resume_len"] == [emitted]
        assert 0 < second["deadline_ms"][0] <= first["deadline_ms"][0]
        same = first.keys() - {"text_input", "deadline_ms"}
        assert {name: second[name] for name in same} == {name: first[name] for name in same}
        assert speaker.asked[0].id != speaker.asked[1].id


async def test_a_generation_that_resumes_one_of_its_callers_is_resumed_too(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    prompt = speaker.tokenizer.encode_prompt(PROMPT)
    ids, text = speaker.answer(prompt, TOKENS)
    async with fakes(speaker) as found, client_of(*found) as client:
        speaker.faults = [Speaker.failing(3, in_band_error="Server exiting")]
        outcome = await client.generate(
            input_ids=[*prompt, *ids[:7]], resume_len=7, max_tokens=TOKENS
        )
        assert [token.id for token in outcome.tokens] == ids[7:]
        assert text.endswith(outcome.text)
        (resume_len,) = speaker.asked[1].tensors["resume_len"]
        assert resume_len > 7


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2), max_size=6), st.sampled_from(["prompt", "input_ids"]))
async def test_losses_may_come_again_and_again(
    tokenizer_dir: Path, losses: list[int], kind: str
) -> None:
    speaker = Speaker(Tokenizer.load(tokenizer_dir))
    # So few steps never emit all tokens, whose last one brings the end with it.
    limits = ResumeLimits(max_failures=9, min_backoff_s=0.001)
    async with (
        fakes(speaker) as found,
        client_of(*found, tokenizer_dir=tokenizer_dir, resume=limits) as client,
    ):
        speaker.faults = [Speaker.failing(after, **LOST[after % len(LOST)]) for after in losses]
        outcome = await client.generate(**asked(speaker, kind))
        check_undisturbed(outcome, speaker, resumes=len(speaker.asked) - 1)


async def test_a_replica_that_dies_takes_no_stream_with_it(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    speaker.delay_s = 0.05
    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        running = [asyncio.create_task(client.generate(**asked(speaker))) for _ in range(32)]
        victim, other = found
        await victim.wait_for(lambda: len(victim.generations) + len(other.generations) == 32)
        await victim.stop()
        lost = sum(received.ended != "finished" for received in victim.generations)
        assert lost > 0
        outcomes = await asyncio.gather(*running)
        for outcome in outcomes:
            check_undisturbed(outcome, speaker, resumes=outcome.finished.resumes)
        assert sum(outcome.finished.resumes for outcome in outcomes) == lost


async def test_with_one_replica_a_stream_waits_until_it_is_back(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    speaker.delay_s = 0.02
    async with fakes(speaker, 1) as [triton], client_of(triton, tokenizer_dir=tokenizer_dir) as c:
        running = [asyncio.create_task(c.generate(**asked(speaker))) for _ in range(4)]
        await triton.wait_for(lambda: len(triton.generations) == 4)
        await asyncio.sleep(0.1)
        port = int(triton.target.rpartition(":")[2])
        await triton.stop()
        await c.wait_serving(False)
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in running)
        await triton.start(port)
        for outcome in await asyncio.gather(*running):
            check_undisturbed(outcome, speaker, resumes=1)


async def test_a_deadline_ends_the_wait(speaker: Speaker, tokenizer_dir: Path) -> None:
    speaker.delay_s = 0.05
    async with fakes(speaker, 1) as [triton], client_of(triton, tokenizer_dir=tokenizer_dir) as c:
        running = asyncio.create_task(c.generate(**asked(speaker), timeout=1.0))
        await triton.wait_for(lambda: bool(triton.generations))
        await triton.stop()
        outcome = await running
        assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_wait_has_a_limit_and_ends_with_the_cause(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    speaker.delay_s = 0.02
    config = {"tokenizer_dir": tokenizer_dir, "resume": ResumeLimits(wait_s=0.2)}
    async with fakes(speaker, 1) as [triton], client_of(triton, **config) as client:
        running = asyncio.create_task(client.generate(**asked(speaker)))
        await triton.wait_for(lambda: bool(triton.generations))
        await asyncio.sleep(0.1)
        await triton.stop()
        outcome = await running
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert outcome.kinds[-1] == "finished"
        assert outcome.finished.usage.output_tokens == len(outcome.tokens) > 0


async def test_a_drain_that_cuts_ends_the_wait(speaker: Speaker, tokenizer_dir: Path) -> None:
    speaker.delay_s = 0.02
    async with (
        fakes(speaker, 1) as [triton],
        running_gateway(triton.target, tokenizer_dir=tokenizer_dir) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        running = asyncio.create_task(client.generate(**asked(speaker)))
        await triton.wait_for(lambda: bool(triton.generations))
        await asyncio.sleep(0.1)
        await triton.stop()
        await client.wait_serving(False)
        async with asyncio.timeout(20):
            await gateway.drain(0.1)
        outcome = await running
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert outcome.message == "the server shut down during the generation"


async def test_an_engine_that_shuts_down_in_order_is_a_loss_too(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    def shut_down(script: Script) -> Script:
        # What was held back of a character comes with it.
        end = Step({"finish_reason": "cancelled", "text_output": "\ufffd"})
        return replace(script, steps=[*script.steps[:5], end])

    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        speaker.faults = [shut_down]
        check_undisturbed(await client.generate(**asked(speaker)), speaker, resumes=1)


@pytest.mark.parametrize("after", [0, 3])
async def test_a_replica_that_falls_silent_loses_its_streams(
    speaker: Speaker, tokenizer_dir: Path, after: int
) -> None:
    limits = ReplicaLimits(stall_s=0.3, first_chunk_stall_s=0.6)
    config = {"tokenizer_dir": tokenizer_dir, "replicas": ReplicaSetConfig(limits=limits)}
    async with fakes(speaker) as found, client_of(*found, **config) as client:
        speaker.faults = [Speaker.silent(after)]
        check_undisturbed(await client.generate(**asked(speaker)), speaker, resumes=1)
        # Its stream there was told to stop, which it does not hear.
        first = speaker.asked[0]
        silent = next(triton for triton in found if first in triton.generations)
        await silent.wait_for(lambda: first.id in silent.stops)


async def test_the_only_replica_may_be_slow(speaker: Speaker, tokenizer_dir: Path) -> None:
    limits = ReplicaLimits(stall_s=0.05, first_chunk_stall_s=0.05)
    config = {"tokenizer_dir": tokenizer_dir, "replicas": ReplicaSetConfig(limits=limits)}
    speaker.delay_s = 0.2
    async with fakes(speaker, 1) as [triton], client_of(triton, **config) as client:
        outcome = await client.generate(**asked(speaker) | {"max_tokens": 8})
        assert outcome.code is grpc.StatusCode.OK
        assert outcome.finished.resumes == 0
        assert len(speaker.asked) == 1


@pytest.mark.parametrize(
    "code",
    [ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.INTERNAL, ErrorCode.CANCELLED],
)
@pytest.mark.parametrize("after", [0, 2])
async def test_other_failures_are_not_tried_again(
    speaker: Speaker, tokenizer_dir: Path, code: ErrorCode, after: int
) -> None:
    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        failure = to_wire(DraftgateError(code, "no"))
        speaker.faults = [Speaker.failing(after, in_band_error=failure)]
        outcome = await client.generate(**asked(speaker))
        assert outcome.code is grpc.StatusCode[code]
        assert len(speaker.asked) == 1


async def test_a_full_queue_is_tried_at_every_replica_once(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    full = Speaker.failing(0, in_band_error="Exceeds maximum queue size")
    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        speaker.faults = [full]
        check_undisturbed(await client.generate(**asked(speaker)), speaker, resumes=0)
        assert all(len(triton.generations) == 1 for triton in found)
        speaker.faults = [full, full]
        refused = await client.generate(**asked(speaker))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert all(len(triton.generations) == 2 for triton in found)


async def test_what_has_begun_waits_for_a_place(speaker: Speaker, tokenizer_dir: Path) -> None:
    full = Speaker.failing(0, in_band_error="Exceeds maximum queue size")
    resume = ResumeLimits(min_backoff_s=0.01, max_backoff_s=0.01)
    config = {"tokenizer_dir": tokenizer_dir, "resume": resume}
    async with fakes(speaker) as found, client_of(*found, **config) as client:
        speaker.faults = [Speaker.failing(3, in_band_error="Server exiting"), *[full] * 12]
        check_undisturbed(await client.generate(**asked(speaker)), speaker, resumes=1)


async def test_attempts_that_bring_nothing_are_limited(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    resume = ResumeLimits(max_failures=3, min_backoff_s=0.01)
    config = {"tokenizer_dir": tokenizer_dir, "resume": resume}
    async with fakes(speaker) as found, client_of(*found, **config) as client:
        speaker.faults = [Speaker.failing(0, in_band_error="Server exiting")] * 9
        outcome = await client.generate(**asked(speaker))
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert outcome.message == "the model server is shutting down"
        assert len(speaker.asked) == 3


async def test_a_generation_that_kills_replicas_does_not_go_on_for_ever(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    config = {"tokenizer_dir": tokenizer_dir, "resume": ResumeLimits(max_resumes=4)}
    async with fakes(speaker) as found, client_of(*found, **config) as client:
        speaker.faults = [Speaker.failing(1, in_band_error="Server exiting")] * 99
        outcome = await client.generate(**asked(speaker))
        assert outcome.code is grpc.StatusCode.UNAVAILABLE
        assert outcome.finished.resumes == 4
        assert len(speaker.asked) == 5


async def test_without_a_tokenizer_text_begins_again_but_does_not_go_on(
    speaker: Speaker,
) -> None:
    fields = asked(speaker) | {"return_token_text": False}
    async with fakes(speaker) as found, client_of(*found) as client:
        speaker.faults = [Speaker.failing(0, in_band_error="Server exiting")]
        outcome = await client.generate(**fields)
        assert (outcome.code, outcome.finished.resumes) == (grpc.StatusCode.OK, 1)
        speaker.faults = [Speaker.failing(1, in_band_error="Server exiting")]
        assert (await client.generate(**fields)).code is grpc.StatusCode.UNAVAILABLE


async def test_another_tokenizer_than_the_replicas_is_not_used(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    async with fakes(speaker) as found, client_of(*found, tokenizer_dir=tokenizer_dir) as client:
        speaker.faults = [
            lambda _: Script(words("a", prompt_len=99).steps, in_band_error="Server exiting")
        ]
        outcome = await client.generate(**asked(speaker) | {"return_token_text": False})
        assert outcome.code is grpc.StatusCode.UNAVAILABLE


async def test_a_generation_goes_on_only_where_its_model_is_served(
    speaker: Speaker, tokenizer_dir: Path
) -> None:
    async with fakes(speaker) as found:
        found[1].description = {**found[1].description, "name": "another"}
        resume = ResumeLimits(wait_s=10.0)
        config = {"tokenizer_dir": tokenizer_dir, "resume": resume}
        async with client_of(*found, **config) as client:
            for _ in range(4):
                speaker.faults = [Speaker.failing(2, in_band_error="Server exiting")]
                outcome = await client.generate(**asked(speaker))
                check_undisturbed(outcome, speaker, resumes=1)
        generations = [len(triton.generations) for triton in found]
        assert all(count % 2 == 0 for count in generations)
