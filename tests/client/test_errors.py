"""How calls fail: one typed error, and what had come stays."""

from __future__ import annotations

import socket

import grpc
import pytest
from google.rpc import error_details_pb2

from draftgate._pb.draftgate.v1.generation_pb2 import (
    GenerateResponse,
    GenerationFinished,
    GenerationStarted,
    TokenChunk,
    Usage,
)
from draftgate.client import (
    CallError,
    DraftgateError,
    ErrorCode,
    FieldViolation,
    FinishReason,
    QuotaViolation,
)
from draftgate.errors import to_wire
from draftgate.gateway.admission import AdmissionConfig
from tests.fakes.triton import FakeTriton, Script, Step, words
from tests.fakes.wire import End, FakeWire, Hang
from tests.support.clients import Opened, opened
from tests.support.gateway import running_gateway

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


async def failure(client: Opened) -> CallError:
    """What a generation fails with."""
    with pytest.raises(CallError) as caught:
        await client.generate("Hi").text()
    return caught.value


async def test_a_field_at_fault_is_named(client: Opened) -> None:
    for ask in (client.generate("Hi", top_p=3.0).text(), client.generate_once("Hi", top_p=3.0)):
        with pytest.raises(CallError) as caught:
            await ask
        error = caught.value
        assert error.code is ErrorCode.INVALID_ARGUMENT
        assert error.reason == "INVALID_ARGUMENT"
        assert error.field.endswith("sampling.top_p")
        assert error.message == f"{error.field}: got 3.0, allowed: a finite number above 0 to 1"
        assert error.field_violations == (FieldViolation(error.field, error.message),)
        assert error.retry_after_s is None
        assert str(error) == error.message


async def test_a_limit_says_whose_it_is_and_when_to_come_back(
    triton: FakeTriton, kind: str
) -> None:
    triton.scripts = [ENDLESS]
    full = AdmissionConfig(max_concurrency=1, max_waiting=0)
    async with (
        running_gateway(triton.target, admission=full) as gateway,
        opened(kind, f"127.0.0.1:{gateway.port}", timeout_s=0.5) as client,
    ):
        await client.wait_serving(timeout_s=30)
        async with client.generate("Hi", timeout_s=30) as running:
            await anext(running)
            error = await failure(client)
    assert error.code is ErrorCode.RESOURCE_EXHAUSTED
    assert error.reason
    assert error.quota_violations == (QuotaViolation("server", error.message),)
    # Longer than the call's own time: so it was not tried again.
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 0.5


async def test_a_failing_stream_keeps_what_came(client: Opened, triton: FakeTriton) -> None:
    lost = to_wire(DraftgateError(ErrorCode.FAILED_PRECONDITION, "lost"))
    triton.scripts = [Script(words("a", "b").steps, in_band_error=lost)]
    generation = client.generate("Hi")
    with pytest.raises(CallError, match="lost") as caught:
        await generation.text()
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert generation.text_so_far == "ab"
    assert generation.finished.finish_reason is FinishReason.NONE
    assert generation.finished.usage.output_tokens == 2
    assert [token.id for token in generation.choices[0].tokens] == [10, 11]
    assert [event async for event in generation] == []  # It has said so once.


async def test_an_end_without_a_finish_keeps_the_text(scripted: Opened, wire: FakeWire) -> None:
    wire.scripts.append(
        [
            GenerateResponse(started=GenerationStarted(request_id="r")),
            GenerateResponse(tokens=TokenChunk(text="half")),
            GenerateResponse(),  # A kind of event that this version does not know.
            End(grpc.StatusCode.DATA_LOSS, "torn"),
        ]
    )
    generation = scripted.generate("Hi")
    with pytest.raises(CallError, match="torn") as caught:
        await generation.completion()
    assert caught.value.code is ErrorCode.INTERNAL
    assert (generation.text_so_far, generation.finished) == ("half", None)


async def test_a_generation_that_was_cancelled_elsewhere_is_an_error(
    scripted: Opened, wire: FakeWire
) -> None:
    """Not the CancelledError of the task that reads it."""
    finished = GenerationFinished(finish_reason="FINISH_REASON_CANCELLED", usage=Usage())
    wire.scripts.append(
        [GenerateResponse(finished=finished), End(grpc.StatusCode.CANCELLED, "stopped")]
    )
    generation = scripted.generate("Hi")
    with pytest.raises(CallError, match="stopped") as caught:
        await generation.text()
    assert caught.value.code is ErrorCode.CANCELLED
    assert generation.finished.finish_reason is FinishReason.CANCELLED


async def test_every_detail_is_read(scripted: Opened, wire: FakeWire) -> None:
    bad = error_details_pb2.BadRequest()
    bad.field_violations.add(field="a.b", description="wrong")
    bad.field_violations.add(field="c", description="wrong too")
    quota = error_details_pb2.QuotaFailure()
    quota.violations.add(subject="tenant:acme", description="too much")
    info = error_details_pb2.ErrorInfo(reason="SOME_LIMIT", domain="draftgate")
    help_ = error_details_pb2.Help()  # Of a kind that nobody reads.
    details = [info, help_, bad, quota]
    wire.scripts.append([End(grpc.StatusCode.ABORTED, "no", retry_after_s=1.25, details=details)])
    error = await failure(scripted)
    assert (error.code, error.message, error.reason) == (ErrorCode.INTERNAL, "no", "SOME_LIMIT")
    assert error.field == "a.b"
    assert error.field_violations == (
        FieldViolation("a.b", "wrong"),
        FieldViolation("c", "wrong too"),
    )
    assert error.quota_violations == (QuotaViolation("tenant:acme", "too much"),)
    assert error.retry_after_s == 1.25


async def test_no_server_is_unavailable(kind: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody can answer here
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with opened(kind, address) as client:
            error = await failure(client)
            assert error.code is ErrorCode.UNAVAILABLE
            with pytest.raises(CallError) as caught:
                await client.model()
            assert caught.value.code is ErrorCode.UNAVAILABLE


async def test_the_time_is_the_calls_deadline(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address, timeout_s=3000, call_timeout_s=2000) as client:
        await client.generate("Hi").text()
        await client.generate("Hi", timeout_s=1000).text()
        await client.generate_once("Hi", timeout_s=1000)
        await client.model()
        await client.generate("Hi", timeout_s=float("inf")).text()
    *limited, unlimited = (call.timeout_s for call in wire.calls)
    assert [round(each or 0, -3) for each in limited] == [3000, 1000, 1000, 2000]
    assert unlimited is None


async def test_a_generation_has_no_deadline_of_its_own(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address) as client:
        await client.generate("Hi").text()
    assert [call.timeout_s for call in wire.calls] == [None]


async def test_a_deadline_that_passes_is_the_error(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address, timeout_s=0.2, call_timeout_s=0.2) as client:
        wire.scripts += [[Hang()]] * 3
        for ask in (client.generate("Hi").text, client.model, client.gate.state):
            with pytest.raises(CallError) as caught:
                await ask()
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
