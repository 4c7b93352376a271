"""What the spans say about who was let in, when, and who was not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway.admission import AdmissionConfig
from draftgate.gateway.auth import SecurityConfig
from tests.fakes.collector import Collector, Exported
from tests.fakes.triton import FakeTriton, Script, Step
from tests.support.gateway import connected, running_gateway
from tests.support.tenants import TenantsFile

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


def generate_spans(collector: Collector) -> list[Exported]:
    """The SERVER spans of Generate calls, in the order of their start."""
    found = [each for each in collector.spans if each.name.endswith("/Generate")]
    return sorted(found, key=lambda each: each.span.start_time_unix_nano)


async def test_a_refusal_names_its_limit_and_a_wait_its_length(
    triton: FakeTriton, collector: Collector
) -> None:
    triton.scripts = [ENDLESS]
    admission = AdmissionConfig(max_concurrency=1, max_waiting=1)
    async with (
        running_gateway(
            triton.target, otlp_endpoint=collector.target, admission=admission
        ) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
        await call.read()
        waiting = asyncio.create_task(client.generate(prompt="Hi", priority=pb.PRIORITY_BATCH))
        await asyncio.sleep(0.05)
        refused = await client.generate(prompt="Hi")
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        assert (await waiting).code is grpc.StatusCode.OK
    at_once, waited, turned_away = (each.attributes for each in generate_spans(collector))
    for other in (at_once, waited):
        assert "draftgate.admission.refusal" not in other
    assert "draftgate.admission.wait_s" not in at_once
    assert waited["draftgate.admission.wait_s"] > 0
    assert waited["draftgate.admission.priority"] == "batch"
    assert turned_away["draftgate.admission.refusal"] == "QUEUE_FULL"
    assert turned_away["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    assert "draftgate.tenant" not in turned_away
    # A refusal is no inference.
    assert len([each for each in collector.spans if each.kind == "CLIENT"]) == 2


async def test_the_tenant_is_named_and_its_key_is_not(
    triton: FakeTriton, collector: Collector, tmp_path: Path
) -> None:
    tenants = TenantsFile(tmp_path / "tenants.yaml")
    key = tenants.add("acme")
    security = SecurityConfig(tenants_file=tenants.path)
    async with (
        running_gateway(
            triton.target, otlp_endpoint=collector.target, security=security
        ) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        outcome = await client.generate(prompt="Hi", metadata=[("x-api-key", key)])
        assert outcome.code is grpc.StatusCode.OK
        refused = await client.generate(prompt="Hi")
        assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    (span,) = generate_spans(collector)
    assert span.attributes["draftgate.tenant"] == "acme"
    assert key not in str([each.span for each in collector.spans])
