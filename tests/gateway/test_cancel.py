"""Whoever leaves early frees the engine's row, however they leave."""

from __future__ import annotations

import asyncio
import signal
import sys

import grpc

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway import Gateway
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import Client

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)

CLIENT = """
import sys, grpc
from draftgate._pb.draftgate.v1 import generation_pb2, generation_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = generation_pb2_grpc.GenerationServiceStub(channel)
for event in stub.Generate(generation_pb2.GenerateRequest(prompt="Hi")):
    print(event.WhichOneof("event"), flush=True)
"""


async def stopped(triton: FakeTriton) -> None:
    """Wait until every generation was stopped by its own id."""
    await triton.wait_for(lambda: bool(triton.generations))
    await triton.wait_for(lambda: all(each.ended for each in triton.generations))
    await triton.wait_for(lambda: len(triton.stops) == len(triton.generations))
    assert sorted(triton.stops) == sorted(each.id for each in triton.generations)


async def test_a_cancelled_call_stops_its_generation(client: Client, triton: FakeTriton) -> None:
    triton.default = ENDLESS
    call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
    for _ in range(5):
        await call.read()
    call.cancel()
    await stopped(triton)
    # Triton ended the stream itself: its RPC was not cancelled.
    assert [each.ended for each in triton.generations] == ["stopped"]


async def test_a_cancel_before_the_first_token_stops_it_too(
    client: Client, triton: FakeTriton
) -> None:
    triton.default = Script([Step({"output_ids": [10]}, delay_s=30.0)])
    call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
    await triton.wait_for(lambda: bool(triton.generations))
    call.cancel()
    await stopped(triton)


async def test_a_deadline_reaches_the_engine_and_stops_it(
    client: Client, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    outcome = await client.generate(prompt="Hi", timeout=0.4)
    assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
    (deadline_ms,) = triton.generations[0].tensors["deadline_ms"]
    assert 0 < deadline_ms <= 400
    await stopped(triton)


async def test_a_call_without_deadline_sends_none(client: Client, triton: FakeTriton) -> None:
    await client.generate(prompt="Hi")
    assert "deadline_ms" not in triton.generations[0].tensors


async def test_a_killed_client_frees_its_row(
    client: Client, gateway: Gateway, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, f"127.0.0.1:{gateway.port}", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"started\n"
    assert await process.stdout.readline() == b"tokens\n"
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await stopped(triton)


async def test_many_cancels_at_random_moments(client: Client, triton: FakeTriton) -> None:
    triton.default = ENDLESS

    async def run(number: int) -> None:
        call = client.generation.Generate(pb.GenerateRequest(prompt=f"p{number}"))
        if number % 4:
            await asyncio.sleep(number * 0.003)
        call.cancel()

    await asyncio.gather(*(run(number) for number in range(40)))
    triton.default = Script([Step({"output_ids": [1], "text_output": "ok"})])
    assert (await client.generate(prompt="Hi")).text == "ok"
    await triton.wait_for(lambda: all(each.ended for each in triton.generations))
    stopped_ids = {each.id for each in triton.generations if each.ended != "finished"}
    await triton.wait_for(lambda: stopped_ids <= set(triton.stops))


async def test_an_id_is_free_again_once_its_call_is_over(
    client: Client, triton: FakeTriton
) -> None:
    triton.default = ENDLESS
    first = client.generation.Generate(pb.GenerateRequest(prompt="Hi", request_id="mine"))
    await first.read()
    second = await client.generate(prompt="Hi", request_id="mine")
    assert second.code is grpc.StatusCode.ALREADY_EXISTS
    assert second.message.startswith("request_id: ")
    assert len(triton.generations) == 1
    first.cancel()
    await stopped(triton)
    # The stop of the first must not reach the second, though the caller gave it the same id.
    triton.default = Script([Step({"output_ids": [1], "text_output": "ok"})])
    third = await client.generate(prompt="Hi", request_id="mine")
    assert third.text == "ok"
    assert len({each.id for each in triton.generations}) == 2
