"""The spans of a request, read back from a real OTLP export."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.gateway import Gateway, convert
from tests.fakes.collector import Collector, Exported
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.support.exporters import wait_for_exporters
from tests.support.gateway import MODEL, Client, connected, running_gateway
from tests.support.session import SessionCall

METHOD = "draftgate.v1.GenerationService/Generate"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


@asynccontextmanager
async def traced(
    triton: FakeTriton, collector: Collector, **config: Any
) -> AsyncIterator[tuple[Gateway, Client]]:
    """A serving gateway that exports to `collector`; leaving flushes the spans."""
    async with (
        running_gateway(triton.target, otlp_endpoint=collector.target, **config) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        yield gateway, client


def generate_spans(collector: Collector) -> tuple[Exported, Exported]:
    """The SERVER span and the CLIENT span of the one Generate call, each exported once."""
    spans = [each for each in collector.spans if not each.name.endswith("GetModel")]
    (server,) = [each for each in spans if each.kind == "SERVER"]
    (inference,) = [each for each in spans if each.kind == "CLIENT"]
    assert len(spans) == 2
    assert server.name == METHOD
    assert inference.span.parent_span_id == server.span.span_id
    assert inference.span.trace_id == server.span.trace_id
    assert server.span.start_time_unix_nano <= inference.span.start_time_unix_nano
    assert inference.span.end_time_unix_nano <= server.span.end_time_unix_nano
    return server, inference


def traceparent(*, sampled: bool) -> list[tuple[str, str]]:
    return [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{'01' if sampled else '00'}")]


async def test_a_generation_that_ends_well(triton: FakeTriton, collector: Collector) -> None:
    triton.scripts = [
        Script(
            [
                Step({"output_ids": [10], "text_output": "a"}),
                *(
                    Step(
                        {
                            "output_ids": list(range(20, 21 + accepted)),
                            "draft_lens": [4],
                            "accepted_lens": [accepted],
                            "draft_source": [2],
                        }
                    )
                    for accepted in (0, 2, 2, 4)
                ),
            ],
            finish_reason="eos",
        )
    ]
    async with traced(triton, collector) as (_, client):
        outcome = await client.generate(
            messages=[pb.ChatMessage(role="user", content="s3cret")],
            request_id="abc",
            max_tokens=50,
            sampling=pb.SamplingParameters(temperature=0.5, top_p=0.25, top_k=7, seed=11),
        )
        assert outcome.code is grpc.StatusCode.OK
    server, inference = generate_spans(collector)
    assert server.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
    }
    assert not server.is_error
    assert server.span.parent_span_id == b""
    assert inference.name == f"chat {MODEL}"
    first_chunk_s = inference.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_chunk_s < 60
    host, _, port = triton.target.rpartition(":")
    assert inference.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "draftgate",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.seed": 11,
        "gen_ai.response.id": "abc",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["eos"],
        "gen_ai.response.time_to_first_chunk": first_chunk_s,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 13,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "server.address": host,
        "server.port": int(port),
        "draftgate.upstream.request_id": triton.generations[0].id,
        "draftgate.spec.num_spec_steps": 4,
        "draftgate.spec.num_draft_tokens": 16,
        "draftgate.spec.num_accepted_draft_tokens": 8,
        "draftgate.spec.draft_acceptance_rate": 0.5,
        "draftgate.spec.mean_acceptance_length": 3.0,
        "draftgate.spec.acceptance_histogram": [1, 0, 2, 0, 1],
    }
    assert not inference.is_error
    assert collector.resources[0]["service.name"] == "draftgate"
    assert "s3cret" not in str(collector.spans)


async def test_a_handler_that_breaks(
    triton: FakeTriton,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(event: object) -> pb.GenerateResponse:
        raise RuntimeError("a bug")

    async with traced(triton, collector) as (_, client):
        with monkeypatch.context() as patch:
            patch.setattr(convert, "response", broken)
            outcome = await client.generate(prompt="Hi")
        assert outcome.code is grpc.StatusCode.INTERNAL
        assert outcome.message == "internal error"
    server, inference = generate_spans(collector)
    for span in (server, inference):
        assert span.is_error
        assert span.attributes["error.type"] == "INTERNAL"
    assert server.attributes["rpc.response.status_code"] == "INTERNAL"
    assert "a bug" in caplog.text


async def test_a_client_that_cancels(triton: FakeTriton, collector: Collector) -> None:
    triton.default = ENDLESS
    async with traced(triton, collector) as (_, client):
        call = client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
        for _ in range(4):
            await call.read()
        call.cancel()
        await triton.wait_for(lambda: triton.generations[0].ended == "stopped")
    server, inference = generate_spans(collector)
    assert server.attributes["rpc.response.status_code"] == "CANCELLED"
    assert not server.is_error
    assert inference.is_error
    assert inference.attributes["error.type"] == "CANCELLED"
    assert inference.attributes["gen_ai.usage.output_tokens"] >= 3
    assert "gen_ai.response.finish_reasons" not in inference.attributes


async def test_a_deadline_that_passes(triton: FakeTriton, collector: Collector) -> None:
    triton.default = ENDLESS
    async with traced(triton, collector) as (_, client):
        outcome = await client.generate(prompt="Hi", timeout=0.3)
        assert outcome.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await triton.wait_for(lambda: triton.generations[0].ended == "stopped")
    server, inference = generate_spans(collector)
    assert server.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    for span in (server, inference):
        assert span.is_error
        assert span.attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert inference.attributes["gen_ai.usage.output_tokens"] > 0


async def test_a_stream_that_is_never_read(triton: FakeTriton, collector: Collector) -> None:
    async with traced(triton, collector) as (_, client):
        client.generation.Generate(pb.GenerateRequest(prompt="Hi"))
        await triton.wait_for(
            lambda: bool(triton.generations) and bool(triton.generations[0].ended)
        )
        await client.get_model()
    server, inference = generate_spans(collector)
    assert inference.attributes["gen_ai.usage.output_tokens"] == 2
    assert server.attributes["rpc.response.status_code"] in ("OK", "CANCELLED")


async def test_a_server_that_stops(triton: FakeTriton, collector: Collector) -> None:
    triton.default = ENDLESS
    async with traced(triton, collector) as (gateway, client):
        running = asyncio.create_task(client.generate(prompt="Hi"))
        await triton.wait_for(lambda: bool(triton.generations))
        await gateway.drain(0.1)
        assert (await running).code is grpc.StatusCode.UNAVAILABLE
    server, inference = generate_spans(collector)
    assert server.attributes["rpc.response.status_code"] == "UNAVAILABLE"
    for span in (server, inference):
        assert span.is_error
        assert span.attributes["error.type"] == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("script", "code", "server_error"),
    [
        (Script(in_band_error="Exceeds maximum queue size"), "RESOURCE_EXHAUSTED", False),
        (Script(in_band_error="Server exiting"), "UNAVAILABLE", True),
        (Script(words("a").steps, no_finish=True), "INTERNAL", True),
    ],
)
async def test_an_engine_that_fails(
    triton: FakeTriton, collector: Collector, script: Script, code: str, server_error: bool
) -> None:
    triton.default = script
    async with traced(triton, collector) as (_, client):
        assert (await client.generate(prompt="Hi")).code is grpc.StatusCode[code]
    server, inference = generate_spans(collector)
    assert server.attributes["rpc.response.status_code"] == code
    assert server.is_error is server_error
    assert inference.is_error
    assert inference.attributes["error.type"] == code


async def test_a_generation_that_lost_its_model_server(
    triton: FakeTriton, collector: Collector
) -> None:
    triton.scripts = [Script(in_band_error="Server exiting"), words("a")]
    async with traced(triton, collector) as (_, client):
        assert (await client.generate(prompt="Hi")).code is grpc.StatusCode.OK
    server, inference = generate_spans(collector)
    assert server.attributes["rpc.response.status_code"] == "OK"
    assert not inference.is_error
    assert inference.attributes["draftgate.upstream.resumes"] == 1
    assert inference.attributes["draftgate.upstream.request_id"] == triton.generations[1].id


async def test_a_refused_request_has_a_server_span_only(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as (_, client):
        await client.generate(prompt="")
        await client.generate_raw(b"\xff\xff")
    for span in collector.spans:
        assert span.kind == "SERVER"
        assert span.attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
        assert not span.is_error
    assert len(collector.spans) == 2


async def test_the_caller_is_the_parent_and_triton_hears_of_it(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector, trace_sample_ratio=0.0) as (_, client):
        await client.generate(
            prompt="Hi", metadata=[*traceparent(sampled=True), ("tracestate", "vendor=1")]
        )
    server, inference = generate_spans(collector)
    assert server.span.trace_id.hex() == TRACE_ID
    assert server.span.parent_span_id.hex() == PARENT_ID
    assert triton.generations[0].metadata["traceparent"] == (
        f"00-{TRACE_ID}-{inference.span.span_id.hex()}-01"
    )
    assert triton.generations[0].metadata["tracestate"] == "vendor=1"


async def test_what_is_not_sampled_is_neither_exported_nor_told_to_triton(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as (_, client):
        outcome = await client.generate(prompt="Hi", metadata=traceparent(sampled=False))
        assert outcome.text == "Hello world"
    async with traced(triton, collector, trace_sample_ratio=0.0) as (_, client):
        await client.generate(prompt="Hi")
    assert collector.spans == []
    assert all("traceparent" not in each.metadata for each in triton.generations)


async def test_without_a_collector_a_sampled_context_is_handed_on(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        await client.generate(prompt="Hi", metadata=traceparent(sampled=True))
        await client.generate(prompt="Hi", metadata=traceparent(sampled=False))
        await client.generate(prompt="Hi")
    handed_on = [each.metadata.get("traceparent") for each in triton.generations]
    assert handed_on == [f"00-{TRACE_ID}-{PARENT_ID}-01", None, None]


@pytest.mark.parametrize("value", ["", "nonsense", "00-0-0-01", f"00-{'0' * 32}-{PARENT_ID}-01"])
async def test_a_malformed_context_is_ignored(
    triton: FakeTriton, collector: Collector, value: str
) -> None:
    async with traced(triton, collector) as (_, client):
        outcome = await client.generate(prompt="Hi", metadata=[("traceparent", value)])
        assert outcome.text == "Hello world"
    server, _ = generate_spans(collector)
    assert server.span.parent_span_id == b""


async def test_concurrent_requests_do_not_mix(triton: FakeTriton, collector: Collector) -> None:
    triton.script_for = lambda received: Script(
        [
            Step({"output_ids": [n]}, delay_s=0.002)
            for n in range(int(received.tensors["text_input"]))
        ]
    )
    async with traced(triton, collector) as (_, client):
        await asyncio.gather(*(client.generate(prompt=str(n)) for n in range(1, 17)))
    servers = {each.span.span_id: each for each in collector.spans if each.kind == "SERVER"}
    inferences = [each for each in collector.spans if each.kind == "CLIENT"]
    assert {each.span.parent_span_id for each in inferences} == set(servers)
    assert sorted(each.attributes["gen_ai.usage.output_tokens"] for each in inferences) == list(
        range(1, 17)
    )


async def test_a_seed_beyond_63_bits_does_not_spoil_the_export(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as (_, client):
        await client.generate(prompt="Hi", sampling=pb.SamplingParameters(seed=2**64 - 1))
    _, inference = generate_spans(collector)
    assert "gen_ai.request.seed" not in inference.attributes


@pytest.mark.parametrize(
    "variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
)
async def test_the_environment_names_the_collector(
    triton: FakeTriton, collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, f"http://{collector.target}")
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        await client.generate(prompt="Hi")
    generate_spans(collector)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "stuck"])
async def test_a_collector_that_does_not_answer_holds_up_neither_calls_nor_the_drain(
    triton: FakeTriton,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    gone: bool,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds; then it gives up for good
    collector.stuck = True
    if gone:
        await collector.stop()
    async with running_gateway(
        triton.target, otlp_endpoint=collector.target, flush_timeout_s=0.2
    ) as gateway:
        async with connected(gateway) as client:
            await client.wait_serving()
            assert (await client.generate(prompt="Hi")).text == "Hello world"
        async with asyncio.timeout(30):
            await gateway.drain(1.0)
    assert "were not exported" in caplog.text
    await asyncio.to_thread(wait_for_exporters)


async def test_a_stop_string_is_a_good_end(triton: FakeTriton, collector: Collector) -> None:
    triton.default = ENDLESS
    async with traced(triton, collector) as (_, client):
        assert (await client.generate(prompt="Hi", stop=["xxx"])).error is None
    _, inference = generate_spans(collector)
    assert inference.attributes["gen_ai.response.finish_reasons"] == ["stop_string"]
    assert inference.attributes["gen_ai.usage.output_tokens"] == 3
    assert not inference.is_error


async def test_the_generations_of_a_session_stand_under_its_call(
    triton: FakeTriton, collector: Collector
) -> None:
    async with traced(triton, collector) as (_, client):
        session = SessionCall(client)
        await session.start("a", request_id="ra")
        await session.start("b", request_id="rb", n=2)
        await session.send(id="c")
        assert await session.finish() is grpc.StatusCode.OK
    (server,) = [each for each in collector.spans if each.kind == "SERVER"]
    assert server.name == "draftgate.v1.SessionService/Session"
    assert server.attributes["rpc.response.status_code"] == "OK"
    inferences = [each for each in collector.spans if each.kind == "CLIENT"]
    names = {each.attributes["gen_ai.response.id"] for each in inferences}
    assert names == {"ra", "rb", "rb.1"}
    assert {each.span.parent_span_id for each in inferences} == {server.span.span_id}
