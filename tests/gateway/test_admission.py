"""A full server, seen by its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway.admission import AdmissionConfig
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import Client, Outcome, connected, running_gateway

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


@asynccontextmanager
async def serving(triton: FakeTriton, **config: Any) -> AsyncIterator[Client]:
    async with (
        running_gateway(triton.target, admission=AdmissionConfig(**config)) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield client


@asynccontextmanager
async def running(client: Client, triton: FakeTriton, count: int = 1) -> AsyncIterator[list[Any]]:
    """So many endless generations."""
    before = len(triton.generations)
    triton.scripts += [ENDLESS] * count
    calls = [client.generation.Generate(pb.GenerateRequest(prompt="Hi")) for _ in range(count)]
    await triton.wait_for(lambda: len(triton.generations) == before + count)
    try:
        yield calls
    finally:
        for call in calls:
            call.cancel()


def detail(outcome: Outcome, message: Any) -> Any:
    (found,) = [each for each in outcome.details if each.Is(message.DESCRIPTOR)]
    found.Unpack(message)
    return message


async def test_the_engines_rows_run_and_the_rest_waits(triton: FakeTriton) -> None:
    triton.description = {**triton.description, "max_batch_rows": 2}
    async with serving(triton) as client, running(client, triton, 2) as calls:
        third = asyncio.create_task(client.generate(prompt="Hi"))
        await asyncio.sleep(0.05)
        assert len(triton.generations) == 2
        calls[0].cancel()
        assert (await third).code is grpc.StatusCode.OK


async def test_a_full_server_refuses_before_any_work(triton: FakeTriton) -> None:
    async with (
        serving(triton, max_concurrency=1, max_waiting=0) as client,
        running(client, triton),
    ):
        outcome = await client.generate(prompt="Hi")
        assert outcome.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert outcome.events == []
        assert outcome.message == (
            "the server is full: 1 generations run and 0 wait, allowed: at most 0"
        )
        assert outcome.reason == "QUEUE_FULL"
        retry = detail(outcome, error_details_pb2.RetryInfo())
        assert retry.retry_delay.ToMilliseconds() == 1000  # Nothing is known yet.
        quota = detail(outcome, error_details_pb2.QuotaFailure())
        (violation,) = quota.violations
        assert violation.subject == "server"
        assert violation.description == outcome.message
        assert len(triton.generations) == 1


async def test_retrying_is_advised_at_the_measured_pace(triton: FakeTriton) -> None:
    triton.default = Script([Step({"output_ids": [1]}, delay_s=0.1)])
    async with serving(triton, max_concurrency=1, max_waiting=2) as client:
        for _ in range(5):
            assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.OK
        async with running(client, triton):
            waiting = [asyncio.create_task(client.generate(prompt="Hi")) for _ in range(2)]
            await asyncio.sleep(0.1)
            outcome = await client.generate(prompt="Hi")
            assert outcome.reason == "QUEUE_FULL"
            retry = detail(outcome, error_details_pb2.RetryInfo())
            assert 100 <= retry.retry_delay.ToMilliseconds() <= 60_000
        assert [each.code for each in await asyncio.gather(*waiting)] == [grpc.StatusCode.OK] * 2


async def test_who_leaves_the_queue_frees_its_place(triton: FakeTriton) -> None:
    async with serving(triton, max_concurrency=1, max_waiting=1) as client:
        async with running(client, triton):
            left = await client.generate(prompt="Hi", timeout=0.05)
            assert left.code is grpc.StatusCode.DEADLINE_EXCEEDED
            call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.sleep(0.05)
            waiting = asyncio.create_task(client.generate(prompt="Hi"))
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert (await waiting).code is grpc.StatusCode.OK
        # Neither of the two that left ever reached the model server.
        assert len(triton.generations) == 2


async def test_the_engine_is_told_what_the_wait_left_of_the_deadline(triton: FakeTriton) -> None:
    async with serving(triton, max_concurrency=1) as client:
        async with running(client, triton):
            waiting = asyncio.create_task(client.generate(prompt="Hi", timeout=30))
            await asyncio.sleep(1.0)
        assert (await waiting).code is grpc.StatusCode.OK
        (left_ms,) = triton.generations[-1].tensors["deadline_ms"]
        assert left_ms <= 29_700


async def test_interactive_requests_overtake_batch_ones(triton: FakeTriton) -> None:
    async with serving(triton, max_concurrency=1) as client:
        async with running(client, triton):
            batch = asyncio.create_task(
                client.generate(prompt="Hi", request_id="batch", priority=pb.PRIORITY_BATCH)
            )
            await asyncio.sleep(0.05)
            human = asyncio.create_task(client.generate(prompt="Hi", request_id="human"))
            await asyncio.sleep(0.05)
        await asyncio.gather(batch, human)
        order = [each.id.rpartition("-")[0] for each in triton.generations[1:]]
        assert order == ["human", "batch"]


async def test_a_priority_that_is_none_is_the_callers_fault(triton: FakeTriton) -> None:
    async with serving(triton) as client:
        outcome = await client.generate(prompt="Hi", priority=7)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
        assert outcome.bad_fields == ["priority"]
        assert outcome.message.startswith("priority: got 7, allowed: PRIORITY_UNSPECIFIED, ")


async def test_a_drain_turns_away_who_waits(triton: FakeTriton) -> None:
    async with (
        running_gateway(triton.target, admission=AdmissionConfig(max_concurrency=1)) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        async with running(client, triton) as calls:
            waiting = asyncio.create_task(client.generate(prompt="Hi"))
            await asyncio.sleep(0.05)
            draining = asyncio.create_task(gateway.drain(20))
            refused = await waiting
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert refused.message == "the server is shutting down"
            calls[0].cancel()
            await draining


async def test_many_at_once_all_come_through(triton: FakeTriton) -> None:
    async with serving(triton, max_concurrency=3, max_waiting=100) as client:
        outcomes = await asyncio.gather(*(client.generate(prompt="Hi") for _ in range(60)))
        assert {each.code for each in outcomes} == {grpc.StatusCode.OK}
        assert len(triton.generations) == 60


@pytest.mark.parametrize("kv_total_tokens", [0, 4096])
async def test_an_engine_may_say_what_its_cache_holds(
    triton: FakeTriton, kv_total_tokens: int
) -> None:
    triton.description = {**triton.description, "kv_total_tokens": kv_total_tokens}
    async with serving(triton) as client:
        assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.OK


async def test_the_kv_cache_limits_how_many_run(triton: FakeTriton) -> None:
    triton.description = {**triton.description, "kv_total_tokens": 300}
    async with serving(triton, kv_overcommit=1.0) as client:
        async with running(client, triton):  # One token of prompt, and of output 256, the default.
            waiting = asyncio.create_task(client.generate(prompt="Hi"))
            await asyncio.sleep(0.05)
            assert len(triton.generations) == 1
        assert (await waiting).code is grpc.StatusCode.OK
