"""The spans of requests in Triton's own protocol, read back from a real OTLP export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.gateway.admission import AdmissionConfig
from tests.fakes.collector import Collector, Exported
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import connected, running_gateway
from tests.support.passing import request, stream

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = (("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),)
SLOW = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.2)])


@asynccontextmanager
async def traced(
    triton: FakeTriton, collector: Collector, **admission: int
) -> AsyncIterator[GRPCInferenceServiceStub]:
    """A client of a gateway that exports to `collector`; leaving flushes the spans."""
    async with (
        running_gateway(
            triton.target,
            otlp_endpoint=collector.target,
            admission=AdmissionConfig(**admission),
        ) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield GRPCInferenceServiceStub(client.channel)


def client_spans(collector: Collector) -> dict[str, Exported]:
    """By the client's ids."""
    found = [each for each in collector.spans if each.kind == "CLIENT"]
    return {each.attributes["gen_ai.response.id"]: each for each in found}


async def test_each_request_of_a_stream_has_its_span(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as stub:
        await stream(
            stub,
            request("secret", "mine"),
            request("secret", "other", model="nowhere"),
            metadata=SAMPLED,
        )
    (server,) = [each for each in collector.spans if each.kind == "SERVER"]
    assert server.name == "inference.GRPCInferenceService/ModelStreamInfer"
    assert server.span.trace_id.hex() == TRACE_ID
    spans = client_spans(collector)
    assert {each.span.parent_span_id for each in spans.values()} == {server.span.span_id}
    fine, failed = spans["mine"], spans["other"]
    (received,) = triton.generations
    host, _, port = triton.target.rpartition(":")
    assert fine.name == "infer ensemble"
    assert fine.attributes == {
        "gen_ai.request.model": "ensemble",
        "gen_ai.response.id": "mine",
        "server.address": host,
        "server.port": int(port),
        "draftgate.upstream.request_id": received.id,
        "draftgate.responses": 3,
    }
    assert fine.span.span_id.hex() in received.metadata["traceparent"]
    assert not fine.is_error
    assert failed.name == "infer nowhere"
    assert failed.is_error
    assert failed.attributes["error.type"] == "NOT_FOUND"
    assert not any("secret" in str(each.span) for each in collector.spans)


async def test_a_call_with_one_response_has_a_span(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as stub:
        await stub.ModelInfer(
            request("secret", "mine", model="preprocessing", max_tokens=None), metadata=SAMPLED
        )
    span = client_spans(collector)["mine"]
    assert span.attributes["draftgate.upstream.request_id"] == "mine"
    assert span.attributes["draftgate.responses"] == 1
    (received,) = triton.inferred
    assert span.span.span_id.hex() in received.metadata["traceparent"]


async def test_a_wait_and_a_refusal_are_told(triton: FakeTriton, collector: Collector) -> None:
    triton.default = SLOW
    async with traced(triton, collector, max_concurrency=1, max_waiting=1) as stub:
        await stream(stub, *(request(request_id=each) for each in ("runs", "waits", "refused")))
    spans = client_spans(collector)
    assert "draftgate.admission.wait_s" not in spans["runs"].attributes
    assert spans["waits"].attributes["draftgate.admission.priority"] == "interactive"
    assert spans["waits"].attributes["draftgate.admission.wait_s"] > 0
    assert spans["refused"].attributes["draftgate.admission.refusal"] == "QUEUE_FULL"
    assert spans["refused"].attributes["error.type"] == "RESOURCE_EXHAUSTED"
    assert "server.address" not in spans["refused"].attributes


@pytest.mark.parametrize("waiting", [False, True])
async def test_a_request_that_is_left_is_cancelled(
    triton: FakeTriton, collector: Collector, waiting: bool
) -> None:
    triton.default = Script([Step(delay_s=3600.0)])
    async with traced(triton, collector, max_concurrency=1) as stub:
        call = stub.ModelStreamInfer()
        await call.write(request(request_id="runs"))
        await triton.wait_for(lambda: bool(triton.generations))
        if waiting:
            await call.write(request(request_id="waits"))
            await asyncio.sleep(0.05)
        call.cancel()
        await triton.wait_for(lambda: bool(triton.stops))
    spans = client_spans(collector)
    assert spans.keys() == ({"runs", "waits"} if waiting else {"runs"})
    assert {each.attributes["error.type"] for each in spans.values()} == {"CANCELLED"}
