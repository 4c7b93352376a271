"""A reader that lags loses its own generation and slows down nobody else."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.upstream.buffer import BufferLimits
from tests.fakes.triton import FakeTriton, Received, Script, Step
from tests.support.gateway import connected, running_gateway

TEXT = "x" * 65536
# Few bytes in flight, so that an idle reader blocks the writer soon.
NARROW = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))


@pytest.fixture
def flood(triton: FakeTriton) -> FakeTriton:
    def script(received: Received) -> Script:
        if received.tensors["text_input"] == "flood":
            return Script([Step({"output_ids": [10], "text_output": TEXT})], endless=True)
        return Script([Step({"output_ids": [11], "text_output": "ok"})])

    triton.script_for = script
    return triton


async def read_to_the_end(call: grpc.aio.UnaryStreamCall) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize(
    "limits",
    [BufferLimits(max_chunks=50), BufferLimits(max_bytes=2**20)],
    ids=["by count", "by bytes"],
)
async def test_a_full_buffer_ends_the_call(flood: FakeTriton, limits: BufferLimits) -> None:
    async with (
        running_gateway(flood.target, stream_limits=limits, write_timeout_s=30.0) as gateway,
        connected(gateway, *NARROW) as slow,
        connected(gateway) as other,
    ):
        await other.wait_serving()
        call = slow.generation.Generate(pb.GenerateRequest(prompt="flood"))
        await call.read()
        await flood.wait_for(lambda: flood.stops == [flood.generations[0].id])
        assert (await other.generate(prompt="Hi")).text == "ok"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read too slowly" in (caught.value.details() or "")
        assert (await other.generate(prompt="Hi")).text == "ok"


async def test_a_write_that_blocks_too_long_ends_the_call(flood: FakeTriton) -> None:
    limits = BufferLimits(max_chunks=10**6, max_bytes=2**40)
    flood.script_for = lambda _: Script(
        [Step({"output_ids": [10], "text_output": TEXT}, delay_s=0.01)], endless=True
    )
    async with (
        running_gateway(flood.target, stream_limits=limits, write_timeout_s=0.3) as gateway,
        connected(gateway, *NARROW) as slow,
    ):
        await slow.wait_serving()
        call = slow.generation.Generate(pb.GenerateRequest(prompt="flood"))
        await call.read()
        await flood.wait_for(lambda: flood.stops == [flood.generations[0].id])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "not read for 0.3 s" in (caught.value.details() or "")


async def test_a_slow_reader_may_leave_while_its_status_waits(
    flood: FakeTriton, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_gateway(flood.target, write_timeout_s=0.2) as gateway,
        connected(gateway, *NARROW) as slow,
        connected(gateway) as other,
    ):
        await other.wait_serving()
        call = slow.generation.Generate(pb.GenerateRequest(prompt="flood"))
        await call.read()
        await flood.wait_for(lambda: flood.stops == [flood.generations[0].id])
        await asyncio.sleep(0.3)
        call.cancel()
        assert (await other.generate(prompt="Hi")).text == "ok"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_pause_within_the_limits_loses_nothing(triton: FakeTriton) -> None:
    triton.default = Script(
        [Step({"output_ids": [index], "text_output": f"{index} "}) for index in range(500)]
    )
    async with running_gateway(triton.target) as gateway, connected(gateway, *NARROW) as slow:
        await slow.wait_serving()
        call = slow.generation.Generate(pb.GenerateRequest(prompt="Hi"))
        text = ""
        async for event in call:
            if not text:
                await asyncio.sleep(0.3)
            text += event.tokens.text
        assert text == "".join(f"{index} " for index in range(500))
        assert triton.stops == []
