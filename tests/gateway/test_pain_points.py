"""What people who put a model server behind gRPC suffer from, where no other test is about it.

Each test says what goes wrong elsewhere; here it must not.
"""

from __future__ import annotations

import ast
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import grpc.aio
import pytest
from packaging.requirements import Requirement

import draftgate
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1.model_pb2 import GetModelRequest
from draftgate._pb.draftgate.v1.model_pb2_grpc import ModelServiceStub
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.upstream import client as upstream_client
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.gateway import Client, connected, running_gateway
from tests.support.good_requests import text_request


@pytest.mark.parametrize(
    "script",
    [
        words("Hello", " world"),
        words("Hello"),
        Script([Step({"output_ids": [], "text_output": ""})], finish_reason="eos"),
        Script(words("Hello").steps, finish_reason="deadline"),
        Script(words("Hello").steps, in_band_error="something odd"),
        Script(words("Hello").steps, status=grpc.StatusCode.INTERNAL, details="it broke"),
        Script(words("Hello").steps, no_finish=True),
    ],
    ids=["tokens", "one token", "none", "deadline", "error in band", "status", "no end"],
)
async def test_the_end_of_a_stream_is_one_event_and_the_last(
    client: Client, triton: FakeTriton, script: Script
) -> None:
    """Elsewhere clients cannot tell that a stream has ended: it stays open, or stops in silence."""
    triton.scripts = [script]
    outcome = await client.generate(prompt="Hi")
    assert outcome.kinds.count("finished") == 1
    assert outcome.kinds[-1] == "finished"


async def test_a_triton_client_is_told_the_end_of_every_request(
    client: Client, triton: FakeTriton
) -> None:
    """The same for a stream of many requests: each ends with a flag under its own id."""
    stub = GRPCInferenceServiceStub(client.channel)
    call = stub.ModelStreamInfer()
    for request_id in ("a", "b", "c"):
        await call.write(text_request(request_id))
    await call.done_writing()
    ended: list[str] = []
    async for response in call:
        answer = response.infer_response
        assert answer.id not in ended
        if answer.parameters["triton_final_response"].bool_param:
            ended.append(answer.id)
    assert sorted(ended) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("length", pb.FINISH_REASON_LENGTH),
        ("eos", pb.FINISH_REASON_EOS),
        ("stop_token", pb.FINISH_REASON_STOP_TOKEN),
    ],
)
async def test_a_cropped_reply_says_so_and_counts_its_tokens(
    client: Client, triton: FakeTriton, told: str, reason: int
) -> None:
    """Elsewhere every reply ends with "stop", also one that was cut off, and without usage."""
    triton.default = Script(words("Hello", " wor").steps, finish_reason=told)
    streamed = (await client.generate(prompt="Hi")).finished
    once = await client.generate_once(prompt="Hi")
    for finished in (streamed, once.choices[0].finished):
        assert finished.finish_reason == reason
        assert finished.usage == pb.Usage(prompt_tokens=3, output_tokens=2, cached_tokens=1)


async def test_one_connection_reaches_every_replica(triton: FakeTriton) -> None:
    """Elsewhere all calls of a channel go to the replica that it happened to connect to."""
    second = FakeTriton()
    await second.start()
    slow = Script([Step({"output_ids": [1], "text_output": "ok"}, delay_s=0.05)])
    triton.default = second.default = slow
    async with (
        running_gateway(f"{triton.target},{second.target}") as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        while not all(each.model for each in (await client.replicas()).values()):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.generate(prompt=f"p{number}") for number in range(16)))
    found = [len(each.generations) for each in (triton, second)]
    assert sum(found) == 16
    assert min(found) >= 4
    await second.stop()


async def test_the_package_needs_no_triton_client() -> None:
    """Elsewhere its pins of protobuf, numpy and gRPC decide what can be installed beside it."""
    needed = map(Requirement, metadata.requires("draftgate") or ())
    always = {
        each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})
    }
    assert "grpcio" in always
    assert not {name for name in always if name.startswith("triton")}
    assert not {name for name in imported_names() if name.startswith("tritonclient")}


async def test_a_generation_costs_one_call_and_a_message_for_each_step(
    client: Client, triton: FakeTriton
) -> None:
    """Elsewhere the proxy costs more than the model: a call or a message more is all it takes."""
    asked = len(triton.gate.asked)
    triton.default = words(*(f"{number} " for number in range(50)))
    outcome = await client.generate(prompt="Hi")
    assert len(triton.generations) == 1
    assert triton.stops == []
    assert len(triton.gate.asked) == asked
    assert outcome.kinds == ["started", *["tokens"] * 50, "finished"]


def test_triton_is_pinged_less_often_than_it_allows() -> None:
    """Elsewhere pings in a silent stream make Triton, which takes one in 300 s, send GOAWAY: all
    generations of the connection end at once."""
    options: dict[str, Any] = dict(upstream_client._CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] > 300_000
    # Nor while nothing runs, or before there is data.
    assert not options.get("grpc.keepalive_permit_without_calls")
    assert not options.get("grpc.http2.max_pings_without_data")


@pytest.mark.slow
async def test_a_client_may_ping_while_its_prefill_is_silent(triton: FakeTriton) -> None:
    """The other side of that: a client that pings every ten seconds, as often as gRPC lets it,
    keeps its connection through a prefill that says nothing."""
    triton.default = Script([Step({"output_ids": [1], "text_output": "ok"}, delay_s=45.0)])
    pings = (("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0))
    async with running_gateway(triton.target) as gateway, connected(gateway, *pings) as client:
        await client.wait_serving()
        outcome = await client.generate(prompt="a long one")
        assert (outcome.code, outcome.text) == (grpc.StatusCode.OK, "ok")


def imported_names() -> Iterator[str]:
    """Every module that the package imports."""
    for file in Path(draftgate.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module)


async def test_calls_that_come_while_the_gateway_is_busy_are_answered(triton: FakeTriton) -> None:
    """Of calls beyond a thousand that wait for its loop gRPC ends some as CANCELLED: in the flood
    in front of a full server clients would not learn that they were refused, and for how long."""
    async with (
        running_gateway(triton.target) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        sent = Event()
        calling = asyncio.create_task(asyncio.to_thread(_call, gateway.address, 2_000, sent))
        await asyncio.sleep(0)
        sent.wait()  # The loop is busy.
        time.sleep(0.5)
        assert Counter(await calling) == {grpc.StatusCode.OK: 2_000}


def _call(address: str, count: int, sent: Event) -> list[grpc.StatusCode]:
    with grpc.insecure_channel(address) as channel:
        stub = ModelServiceStub(channel)
        calls = [stub.GetModel.future(GetModelRequest()) for _ in range(count)]
        sent.set()
        return [call.code() for call in calls]
