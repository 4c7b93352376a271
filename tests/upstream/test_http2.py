"""The HTTP/2 under streaming calls, with servers that do what gRPC's own does not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, GoAwayFrame, PingFrame
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgate.upstream.http2 import Connection, KeepAlive
from tests.support.odd_server import odd_server
from tests.support.stream_calls import PATIENT, called, failure

HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/"),
    (b":authority", b"server"),
]


def message(content: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + len(content).to_bytes(4, "big") + content


def head(h2: H2Connection, **headers: str) -> bytes:
    h2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
    return h2.data_to_send()


def tail(h2: H2Connection, status: str = "0") -> bytes:
    h2.send_headers(1, [("grpc-status", status)], end_stream=True)
    return h2.data_to_send()


def data(content: bytes, *flags: str, padding: int = 0) -> bytes:
    if padding:
        flags = (*flags, "PADDED")
    return DataFrame(1, content, pad_length=padding, flags=flags).serialize()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ([data(message(b"a")), data(message(b"b"))], [b"a", b"b"]),
        ([data(message(b"a") + message(b"") + message(b"c"))], [b"a", b"", b"c"]),
        ([data(message(b"abc")[:2]), data(b""), data(message(b"abc")[2:])], [b"abc"]),
        ([data(message(b"a"), padding=7), data(message(b"b"), padding=255)], [b"a", b"b"]),
    ],
    ids=["apart", "together", "in pieces", "padded"],
)
async def test_frames_in_every_form(body: list[bytes], found: list[bytes]) -> None:
    async with odd_server(lambda h2: head(h2) + b"".join(body) + tail(h2)) as (channel, _):
        assert await called(channel) == found


async def test_a_body_that_ends_the_stream_has_no_status() -> None:
    async with odd_server(lambda h2: head(h2) + data(message(b"a"), "END_STREAM")) as (channel, _):
        code, details = await failure(channel)
    assert (code, details) == (grpc.StatusCode.UNKNOWN, "no gRPC status, HTTP status 200")


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("404", grpc.StatusCode.UNIMPLEMENTED),
        ("503", grpc.StatusCode.UNAVAILABLE),
        ("500", grpc.StatusCode.UNKNOWN),
    ],
)
async def test_an_http_server_that_speaks_no_grpc(status: str, code: grpc.StatusCode) -> None:
    def answer(h2: H2Connection) -> bytes:
        h2.send_headers(1, [(":status", status)], end_stream=True)
        return h2.data_to_send()

    async with odd_server(answer) as (channel, _):
        assert await failure(channel) == (code, f"no gRPC status, HTTP status {status}")


@pytest.mark.parametrize(
    ("error_code", "code"),
    [
        (0x7, grpc.StatusCode.UNAVAILABLE),
        (0x8, grpc.StatusCode.CANCELLED),
        (0xB, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (0x2, grpc.StatusCode.INTERNAL),
        (0xFFFF, grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_stream_that_is_broken_off(error_code: int, code: grpc.StatusCode) -> None:
    def answer(h2: H2Connection) -> bytes:
        h2.reset_stream(1, error_code)
        return h2.data_to_send()

    async with odd_server(answer) as (channel, _):
        details = f"RST_STREAM with error code {error_code}"
        assert await failure(channel) == (code, details)


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 800,
        b"\xff\xff\xff" + bytes(6),
        data(b"a", padding=200)[:9] + b"\xff" + bytes(200),
    ],
    ids=["HTTP/1", "too large", "all padding"],
)
async def test_a_server_that_speaks_something_else_is_no_server(content: bytes) -> None:
    keep_alive = KeepAlive(after_s=0.05, timeout_s=0.1)
    async with odd_server(lambda _: content, keep_alive) as (channel, _):
        code, _details = await failure(channel)
        assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_response_that_is_compressed_or_cut_short_is_an_error() -> None:
    async with odd_server(lambda h2: head(h2) + data(message(b"a", flag=1))) as (channel, _):
        assert await failure(channel) == (grpc.StatusCode.INTERNAL, "a response is compressed")
    async with odd_server(lambda h2: head(h2) + data(message(b"abc")[:-1]) + tail(h2)) as (
        channel,
        _,
    ):
        assert await failure(channel) == (grpc.StatusCode.INTERNAL, "a response is not complete")


async def test_a_server_that_goes_away_names_the_calls_it_did_not_take() -> None:
    async with odd_server(lambda _: GoAwayFrame(0, last_stream_id=0).serialize()) as (channel, _):
        assert await failure(channel) == (grpc.StatusCode.UNAVAILABLE, "the server went away")


async def test_a_server_that_vanishes_is_noticed_by_its_silence() -> None:
    async with odd_server(None, KeepAlive(after_s=0.05, timeout_s=0.05)) as (channel, _):
        assert await failure(channel) == (grpc.StatusCode.UNAVAILABLE, "the server is silent")


async def test_a_server_that_answers_pings_may_be_silent() -> None:
    async with odd_server(head, KeepAlive(after_s=0.02, timeout_s=0.2)) as (channel, server):
        running = asyncio.create_task(called(channel))
        ping = PingFrame(0, b"draftgat").serialize()
        async with asyncio.timeout(10):
            while server.received.count(ping) < 5:
                await asyncio.sleep(0.01)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])


async def test_an_idle_connection_is_not_pinged() -> None:
    async with odd_server(
        lambda h2: head(h2) + tail(h2), KeepAlive(after_s=0.02, timeout_s=0.2)
    ) as (
        channel,
        server,
    ):
        await called(channel)
        await asyncio.sleep(0.2)
        assert server.received.count(PingFrame(0, b"draftgat").serialize()) <= 1


class _Recorder:
    """A stream that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def headers(self, headers: Any) -> None:
        self.heard.append(("headers", dict(headers)))

    def data(self, content: bytes) -> None:
        self.heard.append(("data", content))

    def ended(self) -> None:
        self.heard.append(("ended", None))

    def reset(self, error_code: int) -> None:
        self.heard.append(("reset", error_code))

    def lost(self, reason: str) -> None:
        self.heard.append(("lost", reason))


class _Sink(asyncio.Transport):
    """Where a connection's bytes go."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, content: bytes | bytearray | memoryview) -> None:
        self.written += bytes(content)

    def close(self) -> None:
        pass


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_however_the_bytes_are_cut_the_same_is_heard(bodies: list[bytes], drawn: Any) -> None:
    asyncio.run(_cut_up(bodies, drawn))


async def _cut_up(bodies: list[bytes], drawn: Any) -> None:
    connection, sink, recorder = Connection(PATIENT), _Sink(), _Recorder()
    connection.connection_made(sink)
    connection.open(recorder, HEADERS, b"x")
    h2 = H2Connection(H2Configuration(client_side=False))
    h2.initiate_connection()
    h2.receive_data(sink.written)
    answer = h2.data_to_send() + head(h2) + b"".join(map(data, bodies)) + tail(h2)
    while answer:
        cut = drawn.draw(st.integers(1, len(answer)))
        connection.data_received(answer[:cut])
        answer = answer[cut:]
    kinds = [kind for kind, _ in recorder.heard]
    assert kinds == ["headers", *["data"] * len(bodies), "headers", "ended"]
    assert [content for kind, content in recorder.heard if kind == "data"] == bodies
    connection.close()


def frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + number.to_bytes(4, "big") + payload
    )


frames = st.builds(
    frame,
    st.integers(0, 12),
    st.sampled_from([0, 1, 4, 5, 8, 9, 0x20, 0xFF]),
    st.sampled_from([0, 1, 1, 1, 2, 3, 2**31 - 1, 2**31 + 1]),
    # Of some kinds there is only one size.
    st.binary(max_size=20) | st.binary(min_size=4, max_size=8) | st.just(b"\x88"),
)


@settings(max_examples=500)
@given(st.binary(max_size=200) | st.lists(frames, max_size=8).map(b"".join), st.booleans())
def test_no_bytes_of_a_server_raise(content: bytes, begun: bool) -> None:
    async def run() -> None:
        connection, sink, recorder = Connection(PATIENT), _Sink(), _Recorder()
        connection.connection_made(sink)
        connection.open(recorder, HEADERS, b"x")
        if begun:
            h2 = H2Connection(H2Configuration(client_side=False))
            h2.initiate_connection()
            h2.receive_data(sink.written)
            connection.data_received(h2.data_to_send() + head(h2))
        connection.data_received(content)
        connection.connection_lost(None)
        assert [kind for kind, _ in recorder.heard][-1] in {"lost", "reset", "ended"}

    asyncio.run(run())
