"""Many generations on one stream: none disturbs another, and each ends in its own way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import code_pb2, error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import session_pb2
from draftgate.errors import DraftgateError, ErrorCode, to_wire
from draftgate.upstream.buffer import BufferLimits
from tests.fakes.triton import FakeTriton, Received, Script, Step, words
from tests.support.gateway import Client, connected, running_gateway
from tests.support.session import SessionCall

ENDLESS = Script([Step({"output_ids": [10], "text_output": "x"}, delay_s=0.005)], endless=True)


def by_prompt(received: Received) -> Script:
    """`endless`, `silent` and `broken` are what they say; other prompts come back in ten pieces."""
    prompt = received.tensors["text_input"]
    if prompt == "endless":
        return ENDLESS
    if prompt == "silent":
        return Script([Step({"output_ids": [10]}, delay_s=30.0)])
    if prompt == "broken":
        failure = to_wire(DraftgateError(ErrorCode.UNAVAILABLE, "gone"))
        return Script(words("a", "b").steps, in_band_error=failure)
    return Script(
        [
            Step({"output_ids": [n], "text_output": f"{prompt}{n} "}, delay_s=0.002)
            for n in range(10)
        ]
    )


def text_of(prompt: str) -> str:
    return "".join(f"{prompt}{n} " for n in range(10))


@pytest.fixture(autouse=True)
def scripted(triton: FakeTriton) -> None:
    triton.script_for = by_prompt


def bad_fields(status: session_pb2.SessionStatus) -> list[str]:
    bad = error_details_pb2.BadRequest()
    return [
        violation.field
        for detail in status.details
        if detail.Unpack(bad)
        for violation in bad.field_violations
    ]


async def test_one_generation_says_what_generate_says(client: Client) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="p", request_id="mine")
    outcome = await session.until_ended("a")
    alone = await client.generate(prompt="p", request_id="mine")
    assert outcome.events == alone.events
    assert session.ended["a"] == session_pb2.SessionStatus()
    assert await session.finish() is grpc.StatusCode.OK


async def test_many_run_side_by_side_and_outlive_the_half_close(client: Client) -> None:
    session = SessionCall(client)
    for number in range(40):
        await session.start(f"g{number}", prompt=f"p{number}.")
    assert await session.finish() is grpc.StatusCode.OK
    assert len(session.ended) == 40
    for number in range(40):
        assert session.ended[f"g{number}"].code == code_pb2.OK
        assert session.of(f"g{number}").text == text_of(f"p{number}.")


async def test_an_id_is_free_again_once_its_generation_ended(client: Client) -> None:
    session = SessionCall(client)
    for prompt in ("p", "q"):
        await session.start("a", prompt=prompt)
        outcome = await session.until_ended("a")
        assert outcome.text == text_of(prompt)
        session.outcomes.clear()
        session.ended.clear()
    assert await session.finish() is grpc.StatusCode.OK


async def test_a_failure_is_told_on_the_stream_and_touches_no_other(client: Client) -> None:
    session = SessionCall(client)
    await session.start("good", prompt="p")
    await session.start("bad", prompt="broken")
    assert await session.finish() is grpc.StatusCode.OK
    bad = session.ended["bad"]
    assert (bad.code, bad.message) == (code_pb2.UNAVAILABLE, "gone")
    assert session.of("bad").kinds == ["started", "tokens", "tokens", "finished"]
    assert session.of("good").text == text_of("p")
    # The status is google.rpc.Status on the wire too, details included.
    same = status_pb2.Status.FromString(bad.SerializeToString())
    info = error_details_pb2.ErrorInfo()
    assert [each.Unpack(info) for each in same.details] == [True]
    assert info.reason == "UNAVAILABLE"


async def test_a_cancelled_one_says_what_was_done(client: Client, triton: FakeTriton) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="endless")
    await session.until(lambda: len(session.of("a").tokens) >= 3)
    await session.start("b", prompt="p")
    await session.cancel("a")
    outcome = await session.until_ended("a")
    assert session.ended["a"].code == code_pb2.CANCELLED
    assert outcome.kinds[-1] == "finished"
    assert outcome.finished.usage.output_tokens >= len(outcome.tokens) >= 3
    await session.cancel("a")  # It has ended: without effect.
    await session.cancel("never was")
    assert await session.finish() is grpc.StatusCode.OK
    assert session.of("b").text == text_of("p")
    assert session.refused == []
    await triton.wait_for(lambda: triton.stops == [triton.generations[0].id])


async def test_one_that_has_said_nothing_yet_can_be_cancelled_too(
    client: Client, triton: FakeTriton
) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="silent")
    await triton.wait_for(lambda: len(triton.generations) == 1)
    await session.cancel("a")
    await session.start("b", prompt="silent")
    await session.cancel("b")  # Perhaps before it has reached Triton.
    assert await session.finish() is grpc.StatusCode.OK
    assert {status.code for status in session.ended.values()} == {code_pb2.CANCELLED}
    assert session.outcomes == {}
    # Whichever came first, the stop or what it stops.
    await triton.wait_for(lambda: {each.id for each in triton.generations} <= set(triton.stops))


async def test_all_choices_are_cancelled_together(client: Client, triton: FakeTriton) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="endless", n=3)
    await session.until(lambda: {event.index for event in session.of("a").events} == {0, 1, 2})
    await session.cancel("a")
    await session.until_ended("a")
    assert session.ended["a"].code == code_pb2.CANCELLED
    await triton.wait_for(lambda: len(triton.stops) == 3)
    assert await session.finish() is grpc.StatusCode.OK


async def test_each_has_its_own_time_limit(client: Client, triton: FakeTriton) -> None:
    session = SessionCall(client, timeout=60)
    await session.start("a", prompt="endless", timeout_ms=200)
    await session.start("b", prompt="silent", timeout_ms=200)
    await session.start("c", prompt="p")
    assert await session.finish() is grpc.StatusCode.OK
    assert session.ended["a"].code == code_pb2.DEADLINE_EXCEEDED
    assert session.of("a").kinds[-1] == "finished"
    assert session.ended["b"].code == code_pb2.DEADLINE_EXCEEDED
    assert session.ended["c"].code == code_pb2.OK
    limits = {
        received.tensors["text_input"]: received.tensors["deadline_ms"][0]
        for received in triton.generations
    }
    assert 150 <= limits["endless"] <= 200
    assert 150 <= limits["silent"] <= 200
    assert 50_000 < limits["p"] < 61_000  # gRPC rounds it up
    await triton.wait_for(lambda: len(triton.stops) == 2)


async def test_credits_hold_one_back_and_no_other(client: Client) -> None:
    session = SessionCall(client)
    await session.start("held", prompt="h", credit=2)
    await session.until(lambda: len(session.of("held").chunks) == 2)
    await session.start("free", prompt="p")
    await session.until_ended("free")
    await session.start("none", prompt="n", credit=0)
    await session.until(lambda: session.of("none").kinds == ["started"])
    assert len(session.of("held").chunks) == 2
    await session.grant("held", 3)
    await session.until(lambda: len(session.of("held").chunks) == 5)
    await session.grant("none", 100)
    await session.until_ended("none")
    assert len(session.of("held").chunks) == 5
    await session.grant("held", 5)  # Just enough: `finished` costs nothing.
    await session.grant("nobody", 1)
    assert await session.finish() is grpc.StatusCode.OK
    for name, prompt in (("held", "h"), ("free", "p"), ("none", "n")):
        assert session.ended[name].code == code_pb2.OK
        assert session.of(name).text == text_of(prompt)


async def test_one_without_credits_can_be_cancelled(client: Client) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="endless", credit=1)
    await session.until(lambda: len(session.of("a").chunks) == 1)
    await session.cancel("a")
    outcome = await session.until_ended("a")
    assert session.ended["a"].code == code_pb2.CANCELLED
    assert outcome.kinds[-1] == "finished"
    assert await session.finish() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"stream_limits": BufferLimits(max_chunks=20)}, "read too slowly"),
        ({"credit_timeout_s": 0.2}, "no credits came for 0.2 s"),
    ],
    ids=["by the buffer", "by time"],
)
async def test_one_that_is_never_granted_credits_is_ended_alone(
    triton: FakeTriton, config: dict[str, Any], words: str
) -> None:
    async with running_gateway(triton.target, **config) as gateway, connected(gateway) as client:
        await client.wait_serving()
        session = SessionCall(client)
        await session.start("stuck", prompt="endless", credit=1)
        await session.start("good", prompt="p")
        await session.until_ended("good")
        [stuck] = [each for each in triton.generations if each.tensors["text_input"] == "endless"]
        await triton.wait_for(lambda: triton.stops == [stuck.id])
        await session.grant("stuck", 1)
        await session.until_ended("stuck")
        assert session.ended["stuck"].code == code_pb2.RESOURCE_EXHAUSTED
        assert words in session.ended["stuck"].message
        await session.start("next", prompt="q")
        await session.until_ended("next")
        assert session.of("next").text == text_of("q")


REFUSALS: list[tuple[dict[str, Any], int, list[str]]] = [
    ({}, code_pb2.INVALID_ARGUMENT, ["action"]),
    ({"id": "a"}, code_pb2.INVALID_ARGUMENT, ["action"]),
    (
        {"id": "a", "start": session_pb2.SessionStart()},
        code_pb2.INVALID_ARGUMENT,
        ["start.generation"],
    ),
    (
        {"id": "a", "start": session_pb2.SessionStart(generation=pb.GenerateRequest())},
        code_pb2.INVALID_ARGUMENT,
        ["start.generation.prompt"],
    ),
    (
        {
            "id": "a",
            "start": session_pb2.SessionStart(
                generation=pb.GenerateRequest(
                    prompt="p", sampling=pb.SamplingParameters(verification=9)
                )
            ),
        },
        code_pb2.INVALID_ARGUMENT,
        ["start.generation.sampling.verification"],
    ),
    (
        {
            "id": "a",
            "start": session_pb2.SessionStart(
                generation=pb.GenerateRequest(prompt="p", model="other")
            ),
        },
        code_pb2.NOT_FOUND,
        [],
    ),
    (
        {
            "id": "a",
            "start": session_pb2.SessionStart(
                generation=pb.GenerateRequest(prompt="p"), timeout_ms=0
            ),
        },
        code_pb2.INVALID_ARGUMENT,
        ["start.timeout_ms"],
    ),
    (
        {
            "id": "a",
            "start": session_pb2.SessionStart(
                generation=pb.GenerateRequest(prompt="p"), credits=-1
            ),
        },
        code_pb2.INVALID_ARGUMENT,
        ["start.credits"],
    ),
    (
        {"start": session_pb2.SessionStart(generation=pb.GenerateRequest(prompt="p"))},
        code_pb2.INVALID_ARGUMENT,
        ["id"],
    ),
    (
        {"id": "a b", "start": session_pb2.SessionStart(generation=pb.GenerateRequest(prompt="p"))},
        code_pb2.INVALID_ARGUMENT,
        ["id"],
    ),
    (
        {"id": "a", "credits": session_pb2.SessionCredits()},
        code_pb2.INVALID_ARGUMENT,
        ["credits.tokens_events"],
    ),
    (
        {"id": "a", "credits": session_pb2.SessionCredits(tokens_events=-5)},
        code_pb2.INVALID_ARGUMENT,
        ["credits.tokens_events"],
    ),
]


@pytest.mark.parametrize(
    ("message", "code", "fields"), REFUSALS, ids=[str(n) for n in range(len(REFUSALS))]
)
async def test_what_cannot_be_done_is_refused_and_nothing_else_changes(
    client: Client, triton: FakeTriton, message: dict[str, Any], code: int, fields: list[str]
) -> None:
    session = SessionCall(client)
    await session.start("good", prompt="p")
    await session.send(**message)
    assert await session.finish() is grpc.StatusCode.OK
    [(name, status)] = session.refused
    assert (name, status.code) == (message.get("id", ""), code)
    assert bad_fields(status) == fields
    assert session.of("good").text == text_of("p")
    assert len(triton.generations) == 1


async def test_an_id_in_use_is_refused(client: Client) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="endless", request_id="mine")
    await session.until(lambda: bool(session.of("a").events))
    await session.start("a", prompt="p")
    await session.until(lambda: bool(session.refused))
    [(name, status)] = session.refused
    assert (name, status.code) == ("a", code_pb2.ALREADY_EXISTS)
    # The request_id is the server's to keep apart: of that, the generation itself tells.
    await session.start("b", prompt="p", request_id="mine")
    await session.until_ended("b")
    assert session.ended["b"].code == code_pb2.ALREADY_EXISTS
    await session.cancel("a")
    assert await session.finish() is grpc.StatusCode.OK


async def test_too_many_at_once_are_refused(triton: FakeTriton) -> None:
    async with (
        running_gateway(triton.target, max_session_generations=2) as gateway,
        connected(gateway) as client,
    ):
        await client.wait_serving()
        session = SessionCall(client)
        for name in ("a", "b", "c"):
            await session.start(name, prompt="endless")
        await session.until(lambda: bool(session.refused))
        [(name, status)] = session.refused
        assert (name, status.code) == ("c", code_pb2.RESOURCE_EXHAUSTED)
        await session.cancel("a")
        await session.until_ended("a")
        await session.start("c", prompt="p")
        await session.until_ended("c")
        assert session.of("c").text == text_of("p")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"\xff\xff\xff\xff", "request"),
        (b"\x0a\x01a\x12\x05\x0a\x03\x1a\x05H", "request"),  # a prompt that is cut off
        (b"\x0a\x01a\x12\x06\x0a\x04\x1a\x02\xff\xfe", "request"),  # text that is not UTF-8
        (b"\x08\x01", "id"),  # a number as the id
        (b"\x0a\x01a\x12\x04\x0a\x02\x18\x01", "start.generation.prompt"),  # one as the prompt
    ],
)
async def test_bytes_that_are_no_message_are_refused_and_the_stream_goes_on(
    client: Client, content: bytes, field: str
) -> None:
    call = client.channel.stream_stream(
        "/draftgate.v1.SessionService/Session",
        request_serializer=bytes,
        response_deserializer=session_pb2.SessionResponse.FromString,
    )()
    await call.write(content)
    answer = await call.read()
    assert answer.WhichOneof("content") == "refused"
    assert answer.refused.code == code_pb2.INVALID_ARGUMENT
    assert bad_fields(answer.refused) == [field]
    start = session_pb2.SessionStart(generation=pb.GenerateRequest(prompt="p"))
    await call.write(session_pb2.SessionRequest(id="a", start=start).SerializeToString())
    await call.done_writing()
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    assert "".join(answer.event.tokens.text for answer in answers) == text_of("p")
    assert await call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("half_closed", [False, True])
async def test_leaving_ends_everything(
    client: Client, triton: FakeTriton, half_closed: bool
) -> None:
    session = SessionCall(client)
    for name in ("a", "b", "c"):
        await session.start(name, prompt="endless")
    await session.start("d", prompt="silent")
    await session.start("e", prompt="endless", credit=0)
    await session.until(lambda: {"a", "b", "c", "e"} <= set(session.outcomes))
    await triton.wait_for(lambda: len(triton.generations) == 5)
    if half_closed:
        await session.call.done_writing()
    session.call.cancel()
    await triton.wait_for(lambda: len(triton.stops) == 5)
    assert sorted(triton.stops) == sorted(each.id for each in triton.generations)


async def test_the_deadline_of_the_call_ends_everything(client: Client, triton: FakeTriton) -> None:
    session = SessionCall(client, timeout=0.4)
    await session.start("a", prompt="endless")
    await session.start("b", prompt="silent")
    assert await session.rest() is grpc.StatusCode.DEADLINE_EXCEEDED
    await triton.wait_for(lambda: len(triton.stops) == 2)


async def test_a_stream_that_is_not_read_ends_with_all_in_it(triton: FakeTriton) -> None:
    big = Step({"output_ids": [1], "text_output": "x" * 65536}, delay_s=0.002)
    triton.script_for = lambda _: Script([big], endless=True)
    narrow = (("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0))
    limits = BufferLimits(max_chunks=10**6, max_bytes=2**40)
    async with (
        running_gateway(triton.target, stream_limits=limits, write_timeout_s=0.3) as gateway,
        connected(gateway, *narrow) as slow,
        connected(gateway) as other,
    ):
        await slow.wait_serving()
        session = SessionCall(slow)
        await session.start("a")
        await session.start("b")
        await triton.wait_for(lambda: len(triton.stops) == 2)
        assert await session.rest() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "not read for 0.3 s" in await session.call.details()
        triton.script_for = by_prompt
        assert (await other.generate(prompt="p")).text == text_of("p")


async def test_a_mistake_of_ours_ends_one_generation(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(chunk: object, *_: object) -> None:
        raise KeyError("a mistake of ours")

    session = SessionCall(client)
    with monkeypatch.context() as patched:
        patched.setattr("draftgate.gateway.core._tokens", broken)
        await session.start("a", prompt="p")
        await session.until_ended("a")
    assert session.ended["a"].code == code_pb2.INTERNAL
    assert "mistake" not in session.ended["a"].message
    assert "a mistake of ours" in caplog.text
    await session.start("b", prompt="p")
    await session.until_ended("b")
    assert session.of("b").text == text_of("p")


async def test_a_drain_lets_what_runs_end_and_then_ends_the_session(triton: FakeTriton) -> None:
    async with running_gateway(triton.target) as gateway, connected(gateway) as client:
        await client.wait_serving()
        idle, busy = SessionCall(client), SessionCall(client)
        await idle.start("a", prompt="a")
        await idle.until_ended("a")
        await busy.start("b", prompt="b")
        await busy.until(lambda: bool(busy.of("b").events))
        draining = asyncio.create_task(gateway.drain(20.0))
        await busy.start("c", prompt="c")
        assert await busy.rest() is grpc.StatusCode.UNAVAILABLE
        assert await busy.call.details() == "the server is shutting down"
        assert busy.of("b").text == text_of("b")
        assert busy.ended["b"].code == code_pb2.OK
        assert await idle.rest() is grpc.StatusCode.UNAVAILABLE
        assert await idle.call.details() == "the server is shutting down"
        await draining
        assert triton.stops == []


async def test_details_are_packed_messages(client: Client) -> None:
    session = SessionCall(client)
    await session.start("a", prompt="", max_tokens=1)
    assert await session.finish() is grpc.StatusCode.OK
    [(_, status)] = session.refused
    assert all(isinstance(detail, Packed) for detail in status.details)
    assert status.message.startswith("start.generation.prompt: got ")


ids = st.sampled_from("abc")
actions = st.one_of(
    st.builds(
        lambda name, prompt, credit, n: session_pb2.SessionRequest(
            id=name,
            start=session_pb2.SessionStart(
                generation=pb.GenerateRequest(prompt=prompt, n=n), credits=credit
            ),
        ),
        ids,
        st.sampled_from(["p", "q", "broken", "endless", "silent"]),
        st.none() | st.integers(0, 3),
        st.none() | st.integers(1, 3),
    ),
    st.builds(
        lambda name: session_pb2.SessionRequest(id=name, cancel=session_pb2.SessionCancel()), ids
    ),
    st.builds(
        lambda name, more: session_pb2.SessionRequest(
            id=name, credits=session_pb2.SessionCredits(tokens_events=more)
        ),
        ids,
        st.integers(1, 5),
    ),
    st.builds(lambda name: session_pb2.SessionRequest(id=name), ids),
    st.just(None),  # A moment's pause.
)


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(given_actions=st.lists(actions, max_size=12))
async def test_whatever_is_asked_every_start_has_one_end(
    client: Client, triton: FakeTriton, given_actions: list[session_pb2.SessionRequest | None]
) -> None:
    call = client.sessions.Session()
    for action in given_actions:
        if action is None:
            await asyncio.sleep(0.005)
        else:
            await call.write(action)
    for name in "abc":
        cancel = session_pb2.SessionCancel()
        await call.write(session_pb2.SessionRequest(id=name, cancel=cancel))
    await call.done_writing()
    answers = [answer async for answer in call]
    assert await call.code() is grpc.StatusCode.OK
    kinds = [answer.WhichOneof("content") for answer in answers]
    asked = [action.WhichOneof("action") for action in given_actions if action is not None]
    # All that can be refused is a start under an id in use, and what is no action.
    assert kinds.count("ended") + kinds.count("refused") == asked.count("start") + asked.count(None)
    begun: set[tuple[str, int]] = set()
    for answer, kind in zip(answers, kinds, strict=True):
        choice = (answer.id, answer.event.index)
        if kind == "event" and answer.event.HasField("started"):
            assert choice not in begun
            begun.add(choice)
        elif kind == "event":
            assert choice in begun
        elif kind == "ended":
            begun -= {each for each in begun if each[0] == answer.id}
    assert not begun
    await triton.wait_for(lambda: all(each.ended for each in triton.generations))
