"""What else there is to ask: models, tokens, the gate, replicas, health."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftgate.client import (
    CallError,
    DraftgateError,
    DraftSource,
    ErrorCode,
    GateAcceptance,
    GateCandidate,
    GateCorrection,
    GateCosts,
    GateMode,
    GateOutcome,
    GatePolicy,
    GateReason,
    GateReasonCount,
    GenerationDefaults,
    GenerationLimits,
    LogLevel,
    Message,
    Model,
    Replica,
    ReplicaState,
    ServingStatus,
)
from draftgate.gateway import Gateway
from draftgate.text import Message as TextMessage
from draftgate.text import Tokenizer
from tests.fakes.gate import step
from tests.fakes.triton import DESCRIPTION, FakeTriton
from tests.support.clients import KINDS, Opened, opened
from tests.support.gateway import MODEL, running_gateway


async def test_the_model(client: Opened) -> None:
    model = await client.model()
    assert model == Model(
        name=MODEL,
        architecture="LlamaForCausalLM",
        quantization="FP8",
        compute_dtype="float32",
        vocab_size=1000,
        max_sequence_tokens=512,
        eos_token_ids=(2,),
        has_chat_template=True,
        drafter="ngram",
        max_draft_len=4,
        max_batch_rows=8,
        defaults=GenerationDefaults(
            256,
            {
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
            },
        ),
        limits=GenerationLimits(
            max_output_tokens=None,
            max_prompt_tokens=None,
            max_prompt_bytes=2**20,
            max_messages=1024,
            max_choices=8,
        ),
    )
    assert await client.model(MODEL) == model
    with pytest.raises(CallError) as caught:
        await client.model("other")
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_tokens_and_their_text(triton: FakeTriton, checkpoint_dir: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint_dir)
    triton.description = {**DESCRIPTION, "vocab_size": tokenizer.vocab_size}
    async with running_gateway(triton.target, tokenizer_dir=checkpoint_dir) as gateway:
        for kind in KINDS:  # Loading the tokenizer takes longest.
            async with opened(kind, f"127.0.0.1:{gateway.port}") as client:
                await client.wait_serving(timeout_s=30)
                ids = await client.tokenize("Grüße", model=MODEL)
                assert ids == tuple(tokenizer.encode_prompt("Grüße"))
                assert await client.detokenize(ids) == "Grüße"
                chat = await client.tokenize([Message("user", "Grüße")])
                assert chat == tuple(tokenizer.encode_chat([TextMessage("user", "Grüße")]))


async def test_the_gates_state(client: Opened, triton: FakeTriton) -> None:
    state = await client.gate.state()
    assert state.policy == GatePolicy(GateMode.AUTO, max_step_ms=60.0)
    assert (state.draft_len, state.reason) == (2, GateReason.GAIN)
    assert state.candidates == (GateCandidate(0, 3.0, 38.0), GateCandidate(2, 5.5, 44.0))
    assert state.acceptance == (
        GateAcceptance(DraftSource.EAGLE, (0.68, 0.6, 0.5, 0.5)),
        GateAcceptance(DraftSource.NGRAM, (0.8, 0.75, 0.7, 0.7)),
    )
    assert set(state.reasons) == {
        GateReasonCount(GateReason.PREFILL, 20),
        GateReasonCount(GateReason.GAIN, 1100),
        GateReasonCount(GateReason.DWELL, 80),
    }
    assert state.costs == GateCosts(
        "some CPU; fake-135m; ngram", 125.0, (GateCorrection(2, True, 1.05, 20.0),)
    )
    assert (state.expected_speedup, state.uptime_s) == (1.42, 700.5)
    triton.gate.state |= {"expected_speedup": None, "costs": None}
    state = await client.gate.state(replica=triton.target)
    assert (state.expected_speedup, state.costs) == (None, None)


async def test_a_policy_is_replaced_and_watched(client: Opened, triton: FakeTriton) -> None:
    before = (await client.gate.state()).policy
    async with client.gate.watch(interval_ms=50) as states:
        assert (await anext(states)).policy == before
        changed = dataclasses.replace(before, mode=GateMode.FIXED, draft_len=0, max_step_ms=None)
        assert (await client.gate.set_policy(changed, save=True)).policy == changed
        async with asyncio.timeout(10):
            async for state in states:
                if state.policy == changed:
                    break
    assert [each["mode"] for each in triton.gate.saved] == ["fixed"]


async def test_a_policy_that_cannot_be_is_refused(client: Opened) -> None:
    with pytest.raises(CallError) as refused:
        await client.gate.set_policy(GatePolicy(GateMode.FIXED, draft_len=99))
    assert refused.value.field == "policy.draft_len"
    with pytest.raises(DraftgateError) as unsent:
        await client.gate.set_policy(GatePolicy(GateMode.FIXED, draft_len=2**40))
    for caught in (refused, unsent):
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
        assert caught.value.field == "policy.draft_len"


async def test_the_gates_steps(client: Opened, triton: FakeTriton) -> None:
    triton.gate.steps = [step(number) for number in (3, 4)]
    async with client.gate.watch_steps(interval_ms=50, after_step=1) as batches:
        async with asyncio.timeout(10):
            batch = await anext(batches)
    assert [each.step for each in batch.steps] == [3, 4]
    assert batch.lost == 1
    first = batch.steps[0]
    assert first.reason is GateReason.GAIN
    assert first.outcomes == (
        GateOutcome(DraftSource.EAGLE, 2, 2),
        GateOutcome(DraftSource.NGRAM, 2, 1),
    )
    assert (first.expected_ms, first.measured_ms) == (44.0, 45.5)


async def test_replicas_are_drained_and_back(client: Opened, triton: FakeTriton) -> None:
    ready = Replica(
        triton.target, ReplicaState.READY, "", generations=0, outstanding_tokens=0, ejections=0,
        resumes=0, model="fake-135m",
    )  # fmt: skip
    assert await client.admin.replicas() == (ready,)
    drained = await client.admin.drain_replica(triton.target, move=True)
    assert drained.state is ReplicaState.DRAINING
    assert (await client.admin.undrain_replica(triton.target)).state is ReplicaState.READY
    with pytest.raises(CallError) as caught:
        await client.admin.drain_replica("nowhere:1")
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.fixture
def log_level() -> Iterator[None]:
    before = logging.getLogger("draftgate").level
    yield
    logging.getLogger("draftgate").setLevel(before)


@pytest.mark.usefixtures("log_level")
async def test_the_log_level(client: Opened) -> None:
    await client.admin.set_log_level(LogLevel.ERROR)
    assert await client.admin.set_log_level(LogLevel.INFO) is LogLevel.ERROR


async def test_health_and_the_end_of_it(client: Opened, gateway: Gateway) -> None:
    service = "draftgate.v1.GenerationService"
    assert await client.health() is ServingStatus.SERVING
    assert await client.health(service) is ServingStatus.SERVING
    with pytest.raises(CallError) as caught:
        await client.health("no.Service")
    assert caught.value.code is ErrorCode.NOT_FOUND
    async with client.watch_health("no.Service") as statuses:
        assert await anext(statuses) is ServingStatus.SERVICE_UNKNOWN
    async with client.watch_health(service) as statuses:
        assert await anext(statuses) is ServingStatus.SERVING
        assert await client.admin.drain() == 0
        assert await anext(statuses) is ServingStatus.NOT_SERVING
    with pytest.raises(CallError) as caught:
        await client.generate("Hi").text()
    assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_waiting_for_a_server_that_does_not_serve_ends(triton: FakeTriton, kind: str) -> None:
    triton.server_ready = False
    async with (
        running_gateway(triton.target) as gateway,
        opened(kind, f"127.0.0.1:{gateway.port}") as client,
    ):
        with pytest.raises(CallError) as caught:
            await client.wait_serving(timeout_s=0.2)
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
