"""Triton's own protocol in front of two real replicas."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tests.chaos.conftest import Replicas, running_replicas
from tests.support.passing import Streamed, add, request, rest, stream

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "triton_client.py"
COUNT, TOKENS = 8, 300
PROMPTS = [f"Why is the sky blue? ({number})" for number in range(COUNT)]


def asked(number: int) -> Any:
    made = request(PROMPTS[number], str(number), max_tokens=TOKENS)
    add(made, "temperature", "FP32", struct.pack("<f", 0.0))
    return made


async def undisturbed(replicas: Replicas) -> list[str]:
    """The texts as our own API has them."""
    outcomes = await asyncio.gather(
        *(
            replicas.client.generate(
                prompt=prompt,
                max_tokens=TOKENS,
                sampling=generation_pb2.SamplingParameters(temperature=0.0),
            )
            for prompt in PROMPTS
        )
    )
    assert all(outcome.error is None for outcome in outcomes)
    return [outcome.text for outcome in outcomes]


async def running(replicas: Replicas, stub: GRPCInferenceServiceStub) -> asyncio.Task[Streamed]:
    """One stream with all requests, which run on both replicas."""
    call = stub.ModelStreamInfer()
    for number in range(COUNT):
        await call.write(asked(number))
    await call.done_writing()
    found = asyncio.create_task(rest(call))
    async with asyncio.timeout(60):
        while not all([(await replicas.state_of(index)).generations for index in (0, 1)]):
            await asyncio.sleep(0.01)
    return found


async def test_one_clients_requests_run_on_both_replicas(model_dir: Path) -> None:
    async with running_replicas(model_dir, 2) as replicas:
        stub = GRPCInferenceServiceStub(replicas.client.channel)
        texts = await undisturbed(replicas)
        found = await (await running(replicas, stub))
        assert (found.error, found.errors) == (None, {})
        assert [found.text(str(number)) for number in range(COUNT)] == texts
        await check_statistics(replicas, stub)
        await check_nvidias_client(replicas, texts[0])

        dying = await running(replicas, stub)
        replicas.kill(0)
        found = await dying
        assert found.error is None
        # What had begun there is told; what had not went to the other.
        assert len(found.errors) < COUNT
        for number in range(COUNT):
            if str(number) not in found.errors:
                assert found.text(str(number)) == texts[number]
        again = await stream(stub, asked(0), asked(1))
        assert (again.errors, again.text("0"), again.text("1")) == ({}, texts[0], texts[1])


async def check_statistics(replicas: Replicas, stub: GRPCInferenceServiceStub) -> None:
    asked_for = pb.ModelStatisticsRequest(name="ensemble")
    counts = []
    for server in replicas.servers:
        async with grpc.aio.insecure_channel(server.grpc_target) as channel:
            direct = await GRPCInferenceServiceStub(channel).ModelStatistics(asked_for)
        counts += [each.inference_stats.success.count for each in direct.model_stats]
    (total,) = (await stub.ModelStatistics(asked_for)).model_stats
    assert len(counts) == 2
    assert total.inference_stats.success.count == sum(counts) > 0


async def check_nvidias_client(replicas: Replicas, text: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--target", f"127.0.0.1:{replicas.gateway.port}"]
    command += ["--prompt", PROMPTS[0], "--max-tokens", str(TOKENS)]
    ran = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.decode() == text + "\n"
