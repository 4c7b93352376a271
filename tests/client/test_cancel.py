"""Whoever leaves early ends the generation in the engine, however they leave."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.client import AsyncClient, CallError, Client, ErrorCode, Tokens
from draftgate.gateway import Gateway
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.clients import Opened

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


@pytest.fixture(autouse=True)
def endless(triton: FakeTriton) -> None:
    triton.default = ENDLESS


async def stopped(triton: FakeTriton) -> None:
    """Wait until the one generation was stopped."""
    await triton.wait_for(lambda: bool(triton.generations))
    await triton.wait_for(lambda: triton.generations[0].ended == "stopped")
    assert triton.stops == [triton.generations[0].id]


async def test_leaving_the_context_ends_it(client: Opened, triton: FakeTriton) -> None:
    async with client.generate("Hi") as generation:
        async for event in generation:
            if isinstance(event, Tokens):
                break
    await stopped(triton)
    assert generation.text_so_far.startswith("x")


async def test_an_error_in_the_context_ends_it(client: Opened, triton: FakeTriton) -> None:
    async def run() -> None:
        async with client.generate("Hi") as generation:
            await anext(generation)
            raise KeyError("of the caller")

    with pytest.raises(KeyError):
        await run()
    await stopped(triton)


async def test_cancel_ends_it_for_who_reads(client: Opened, triton: FakeTriton) -> None:
    generation = client.generate("Hi")
    reading = asyncio.ensure_future(generation.text())
    await triton.wait_for(lambda: len(triton.generations) == 1)
    await asyncio.sleep(0.05)
    generation.cancel()
    with pytest.raises(CallError) as caught:
        await reading
    assert caught.value.code is ErrorCode.CANCELLED
    await stopped(triton)
    generation.cancel()  # Once more does no harm.


async def test_the_time_limit_ends_it(client: Opened, triton: FakeTriton) -> None:
    generation = client.generate("Hi", timeout_s=0.3)
    with pytest.raises(CallError) as caught:
        await generation.text()
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert generation.text_so_far.startswith("x")
    await stopped(triton)


async def test_closing_the_client_ends_it(kind: str, gateway: Gateway, triton: FakeTriton) -> None:
    address = f"127.0.0.1:{gateway.port}"
    if kind == "asyncio":
        async with AsyncClient(address) as client:
            await client.wait_serving(timeout_s=30)
            generation = client.generate("Hi")
            await anext(generation)
        with pytest.raises(CallError) as caught:
            await generation.text()
    else:
        with Client(address) as blocking:
            await asyncio.to_thread(blocking.wait_serving, timeout_s=30)
            running = blocking.generate("Hi")
            await asyncio.to_thread(next, running)
        with pytest.raises(CallError) as caught:
            await asyncio.to_thread(running.text)
    assert caught.value.code is ErrorCode.CANCELLED
    await stopped(triton)


@pytest.fixture
async def asynchronous(gateway: Gateway) -> AsyncClient:
    client = AsyncClient(f"127.0.0.1:{gateway.port}")
    await client.wait_serving(timeout_s=30)
    return client


async def test_cancelling_the_task_ends_it(asynchronous: AsyncClient, triton: FakeTriton) -> None:
    async with asynchronous as client:
        task = asyncio.create_task(client.generate("Hi").text())
        await triton.wait_for(lambda: len(triton.generations) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stopped(triton)


async def test_so_does_a_timeout_around_it(asynchronous: AsyncClient, triton: FakeTriton) -> None:
    async with asynchronous as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.generate_once("Hi")
        await stopped(triton)
