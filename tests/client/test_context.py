"""What goes along with every call: trace context and baggage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import baggage, context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from draftgate.client import AsyncClient
from tests.fakes.collector import Collector
from tests.fakes.triton import FakeTriton
from tests.fakes.wire import FakeWire
from tests.support.clients import opened
from tests.support.gateway import running_gateway

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
SPAN_ID = 0xB7AD6B7169203331
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def traced() -> Iterator[None]:
    """As inside a span of the caller."""
    caller = NonRecordingSpan(
        SpanContext(
            TRACE_ID,
            SPAN_ID,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
            trace_state=TraceState([("vendor", "1")]),
        )
    )
    token = context.attach(baggage.set_baggage("user", "Zoë", trace.set_span_in_context(caller)))
    try:
        yield
    finally:
        context.detach(token)


async def test_the_context_of_the_caller_goes_along(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address) as client:
        with traced():
            await client.generate("Hi").text()
            await client.model()
            stream = client.gate.watch()
        # The call belongs to where it was begun, not to where it is read.
        assert [state.rows async for state in stream] == [0]
        await client.model()
    *inside, outside = wire.calls
    for call in inside:
        assert call.metadata["traceparent"] == TRACEPARENT
        assert call.metadata["tracestate"] == "vendor=1"
        assert call.metadata["baggage"] == "user=Zo%C3%AB"
    assert not {"traceparent", "tracestate", "baggage"} & outside.metadata.keys()


async def test_so_it_does_with_a_session(wire: FakeWire) -> None:
    wire.scripts.append([])
    async with AsyncClient(wire.address) as client:
        with traced():
            async with client.session() as session:
                session.generate("Hi")
                await wire.wait_for(lambda: len(wire.calls) == 1)
    assert wire.calls[0].metadata["traceparent"] == TRACEPARENT


async def test_the_gateways_spans_are_children_of_the_callers(
    triton: FakeTriton, kind: str
) -> None:
    collector = Collector()
    await collector.start()
    async with (
        running_gateway(triton.target, otlp_endpoint=collector.target) as gateway,
        opened(kind, f"127.0.0.1:{gateway.port}") as client,
    ):
        await client.wait_serving(timeout_s=30)
        with traced():
            assert await client.generate("Hi").text() == "Hello world"
    await collector.stop()
    (server,) = [each for each in collector.spans if each.kind == "SERVER"]
    assert server.name == "draftgate.v1.GenerationService/Generate"
    assert server.span.trace_id == TRACE_ID.to_bytes(16)
    assert server.span.parent_span_id == SPAN_ID.to_bytes(8)
    assert server.span.trace_state == "vendor=1"
