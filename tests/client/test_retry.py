"""What is tried again: what the server says may be, and only before anything has come."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1.generation_pb2 import (
    GenerateOnceResponse,
    GenerateResponse,
    GenerationFinished,
    GenerationStarted,
    TokenChunk,
)
from draftgate.client import (
    CallError,
    DraftgateError,
    ErrorCode,
    RetryPolicy,
    Started,
    Tokens,
    retry,
)
from draftgate.client.retry import Attempts
from tests.fakes.wire import End, FakeWire
from tests.support.clients import Opened, opened

STARTED = GenerateResponse(started=GenerationStarted(request_id="r", model="m"))
TOKENS = GenerateResponse(tokens=TokenChunk(text="text"))
FINISHED = GenerateResponse(finished=GenerationFinished(finish_reason="FINISH_REASON_EOS"))

FULL = End(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0.01)
AWAY = End(grpc.StatusCode.UNAVAILABLE, "away", retry_after_s=0.01)


async def fails(client: Opened, code: ErrorCode) -> None:
    """A generation does, so."""
    with pytest.raises(CallError) as caught:
        await client.generate("Hi").text()
    assert caught.value.code is code


async def test_what_was_turned_away_comes_again(scripted: Opened, wire: FakeWire) -> None:
    wire.scripts += [[FULL], [AWAY], [STARTED, TOKENS, FINISHED]]
    events = [event async for event in scripted.generate("Hi")]
    assert [type(event).__name__ for event in events] == ["Started", "Tokens", "Finished"]
    assert len(wire.calls) == 3
    assert len({call.request for call in wire.calls}) == 1


async def test_so_does_a_whole_generation(scripted: Opened, wire: FakeWire) -> None:
    whole = GenerateOnceResponse()
    whole.choices.add(text="all")
    wire.scripts += [[FULL], [whole]]
    assert (await scripted.generate_once("Hi")).text == "all"
    assert wire.methods == ["draftgate.v1.GenerationService/GenerateOnce"] * 2


async def test_attempts_are_bounded(wire: FakeWire, kind: str) -> None:
    for attempts in (1, 4):
        wire.calls.clear()
        wire.scripts.extend([[FULL]] * attempts)
        policy = RetryPolicy(max_attempts=attempts)
        async with opened(kind, wire.address, retry=policy) as client:
            await fails(client, ErrorCode.RESOURCE_EXHAUSTED)
        assert len(wire.calls) == attempts


@pytest.mark.parametrize("came", [[STARTED, TOKENS], [STARTED], [FINISHED]])
async def test_nothing_of_which_something_has_come_is_tried_again(
    scripted: Opened, wire: FakeWire, came: list[GenerateResponse]
) -> None:
    wire.scripts += [[*came, AWAY]]
    generation = scripted.generate("Hi")
    with pytest.raises(CallError, match="away"):
        await generation.text()
    assert len(wire.calls) == 1
    assert len(generation.choices) == 1


@pytest.mark.parametrize(
    "end",
    [
        End(grpc.StatusCode.RESOURCE_EXHAUSTED),
        End(grpc.StatusCode.UNAVAILABLE),
        End(grpc.StatusCode.PERMISSION_DENIED, retry_after_s=0.01),
        End(grpc.StatusCode.INTERNAL, retry_after_s=0.01),
        # Longer than this client waits.
        End(grpc.StatusCode.UNAVAILABLE, retry_after_s=3600.0),
    ],
)
async def test_nothing_else_is_tried_again(scripted: Opened, wire: FakeWire, end: End) -> None:
    wire.scripts += [[end], [end]]
    await fails(scripted, ErrorCode[end.code.name])
    with pytest.raises(CallError):
        await scripted.model()
    assert len(wire.calls) == 2


async def test_a_wait_beyond_the_deadline_is_not_begun(wire: FakeWire, kind: str) -> None:
    wire.scripts.append([End(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=20)])
    async with opened(kind, wire.address, timeout_s=10) as client:
        await fails(client, ErrorCode.RESOURCE_EXHAUSTED)
    assert len(wire.calls) == 1


async def test_later_attempts_have_what_is_left_of_the_time(
    scripted: Opened, wire: FakeWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    wire.scripts += [[FULL], [FINISHED]]
    await scripted.generate("Hi", timeout_s=9000).text()
    # The call began at 0; at 2000 it was seen that the wait fits.
    assert [round(call.timeout_s or 0, -3) for call in wire.calls] == [8000, 6000]


async def test_a_wait_can_be_left(scripted: Opened, wire: FakeWire) -> None:
    wire.scripts.append([End(grpc.StatusCode.UNAVAILABLE, retry_after_s=25)])
    generation = scripted.generate("Hi")
    waiting = asyncio.ensure_future(generation.text())
    async with asyncio.timeout(10):
        while not wire.calls:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        generation.cancel()
        with pytest.raises(CallError) as caught:
            await waiting
    assert caught.value.code is ErrorCode.CANCELLED
    assert len(wire.calls) == 1


@given(
    asked_s=st.floats(0, 100),
    jitter=st.floats(0, 2),
    most_s=st.floats(0, 100),
)
def test_a_wait_is_never_shorter_than_asked_nor_longer_than_allowed(
    asked_s: float, jitter: float, most_s: float
) -> None:
    attempts = Attempts(RetryPolicy(max_delay_s=most_s, jitter=jitter), None)
    wait_s = attempts.wait_s(CallError(ErrorCode.UNAVAILABLE, "no", retry_after_s=asked_s))
    if asked_s > most_s:
        assert wait_s is None
    else:
        assert wait_s is not None
        assert asked_s <= wait_s <= min(most_s, asked_s * (1 + jitter))


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 0), ("max_delay_s", -1.0), ("jitter", float("nan"))],
)
def test_a_policy_that_is_none_is_refused(field: str, value: float) -> None:
    with pytest.raises(DraftgateError) as caught:
        RetryPolicy(**{field: value})  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == field


async def test_the_events_of_a_refused_attempt_are_those_of_the_next_alone(
    scripted: Opened, wire: FakeWire
) -> None:
    wire.scripts += [[FULL], [STARTED, TOKENS, TOKENS, FINISHED]]
    generation = scripted.generate("Hi")
    kinds = [type(event) async for event in generation]
    assert kinds.count(Started) == 1
    assert kinds.count(Tokens) == 2
    assert generation.text_so_far == "texttext"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_a_time_limit_that_is_none_is_the_callers_fault(timeout_s: float) -> None:
    with pytest.raises(
        DraftgateError, match=r"timeout_s: got .*, allowed: a time above 0"
    ) as raised:
        Attempts(RetryPolicy(), timeout_s)
    assert raised.value.code is ErrorCode.INVALID_ARGUMENT


@pytest.mark.parametrize("timeout_s", [1e12, 1e30, float("inf")])
async def test_a_time_limit_far_away_is_not_over_at_once(
    scripted: Opened, wire: FakeWire, timeout_s: float
) -> None:
    """gRPC counts nanoseconds, in 64 bits."""
    wire.scripts.append([STARTED, TOKENS, FINISHED])
    assert await scripted.generate("Hi", timeout_s=timeout_s).text() == "text"
