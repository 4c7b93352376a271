"""Streaming calls with a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from draftgate.upstream.streams import CallError, StreamChannel
from tests.support.stream_calls import METHOD, PATIENT, called, failure

Handler = Callable[[Any, Any], Awaitable[None]]


@asynccontextmanager
async def served(
    handle: Handler, *options: tuple[str, Any]
) -> AsyncIterator[tuple[StreamChannel, grpc.aio.Server]]:
    """A channel to a real gRPC server whose one method is `handle`, of bytes."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), *options])
    service, method = METHOD.strip("/").split("/")
    handler = grpc.stream_stream_rpc_method_handler(handle)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = StreamChannel(f"127.0.0.1:{port}", PATIENT)
    try:
        yield channel, server
    finally:
        await channel.close()
        await server.stop(None)


async def echo(requests: Any, context: Any) -> None:
    async for request in requests:
        await context.write(request)


@pytest.mark.parametrize("size", [0, 1, 16_379, 16_380, 70_000, 9_000_000])
async def test_requests_and_responses_of_any_size(size: int) -> None:
    request = bytes(range(256)) * (size // 256 + 1)
    async with served(echo) as (channel, _):
        assert await called(channel, request[:size]) == [request[:size]]


async def test_many_responses_come_in_order_and_windows_never_run_out() -> None:
    async def handle(requests: Any, context: Any) -> None:
        for number in range(40_000):
            await context.write(number.to_bytes(4, "big") * 100)

    async with served(handle) as (channel, _):
        found = await called(channel)
    assert [int.from_bytes(each[:4], "big") for each in found] == list(range(40_000))
    assert {len(each) for each in found} == {400}


async def test_calls_at_once_share_a_connection_and_do_not_mix() -> None:
    peers = set()

    async def handle(requests: Any, context: Any) -> None:
        peers.add(context.peer())
        async for request in requests:
            for _ in range(20):
                await context.write(request)
                await asyncio.sleep(0)

    async with served(handle) as (channel, _):
        requests = [bytes([number]) * 3_000 for number in range(50)]
        await called(channel, b"first")
        found = await asyncio.gather(*(called(channel, each) for each in requests))
    assert found == [[each] * 20 for each in requests]
    assert len(peers) == 1


async def test_metadata_goes_with_the_call() -> None:
    seen: dict[str, str] = {}

    async def handle(requests: Any, context: Any) -> None:
        seen.update(context.invocation_metadata())

    async with served(handle) as (channel, _):
        await called(channel, metadata=(("traceparent", "00-1-2-01"),))
    assert seen["traceparent"] == "00-1-2-01"
    assert seen["user-agent"].startswith("draftgate/")


@pytest.mark.parametrize("code", [each for each in grpc.StatusCode if each.value[0]])
@pytest.mark.parametrize("answers", [0, 1])
async def test_a_status_comes_with_its_words(code: grpc.StatusCode, answers: int) -> None:
    words = "50 % of what?\nΔ"

    async def handle(requests: Any, context: Any) -> None:
        for _ in range(answers):
            await context.write(b"x")
        await context.abort(code, words)

    async with served(handle) as (channel, _):
        assert await failure(channel) == (code, words)


async def test_a_method_that_is_not_there() -> None:
    async with served(echo) as (channel, _):
        with pytest.raises(CallError) as raised:
            await channel.call("/some.Service/Other", b"", (), pytest.fail)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_leaving_a_call_ends_it_at_the_server_and_no_other() -> None:
    ended: list[bytes] = []

    async def handle(requests: Any, context: Any) -> None:
        request = await anext(requests)
        try:
            while True:
                await context.write(request)
                await asyncio.sleep(0.001)
        finally:
            ended.append(request)

    async with served(handle) as (channel, _):
        took: dict[bytes, int] = {b"a": 0, b"b": 0}

        def take(response: bytes) -> None:
            took[response] += 1

        calls = {
            request: asyncio.create_task(channel.call(METHOD, request, (), take))
            for request in took
        }
        while not all(took.values()):
            await asyncio.sleep(0.001)
        calls[b"a"].cancel()
        await asyncio.wait([calls[b"a"]])
        at_the_end = took[b"a"]
        while b"a" not in ended:
            await asyncio.sleep(0.001)
        before = took[b"b"]
        while took[b"b"] < before + 20:
            await asyncio.sleep(0.001)
        assert (took[b"a"], ended) == (at_the_end, [b"a"])
        calls[b"b"].cancel()
        await asyncio.wait(calls.values())


async def test_what_the_taker_raises_ends_the_call_alone() -> None:
    def take(response: bytes) -> None:
        raise ValueError("no use")

    async with served(echo) as (channel, _):
        with pytest.raises(ValueError, match="no use"):
            await channel.call(METHOD, b"x", (), take)
        assert await called(channel, b"y") == [b"y"]


async def test_a_server_that_stops_lets_calls_end_and_takes_no_new_ones() -> None:
    """gRPC's server first says that it will go, and then until which call it will serve."""
    go_on = asyncio.Event()

    async def handle(requests: Any, context: Any) -> None:
        await context.write(b"one")
        await go_on.wait()
        await context.write(b"two")

    async with served(handle) as (channel, server):
        found: list[bytes] = []
        running = asyncio.create_task(channel.call(METHOD, b"", (), found.append))
        while not found:
            await asyncio.sleep(0.001)
        stopping = asyncio.create_task(server.stop(10))
        await asyncio.sleep(0.1)
        code, _ = await failure(channel)
        assert code is grpc.StatusCode.UNAVAILABLE
        go_on.set()
        await running
        await stopping
    assert found == [b"one", b"two"]


async def test_a_server_that_is_cut_off_loses_its_calls_and_is_found_again() -> None:
    async def handle(requests: Any, context: Any) -> None:
        await context.write(b"one")
        await asyncio.sleep(60)

    async with served(handle) as (channel, server):
        running = asyncio.create_task(failure(channel))
        await asyncio.sleep(0.1)
        await server.stop(None)
        code, _ = await running
        assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        assert (await failure(channel))[0] is grpc.StatusCode.UNAVAILABLE


async def test_nobody_listens() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    channel = StreamChannel(f"127.0.0.1:{port}", PATIENT)
    code, details = await failure(channel)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.startswith(f"failed to connect to 127.0.0.1:{port}")
    await channel.close()


async def test_more_calls_than_a_connection_takes_open_another() -> None:
    go_on = asyncio.Event()
    peers = set()

    async def handle(requests: Any, context: Any) -> None:
        peers.add(context.peer())
        await go_on.wait()
        await context.write(b"x")

    async with served(handle, ("grpc.max_concurrent_streams", 3)) as (channel, _):
        go_on.set()
        await called(channel)  # Now the limit is known.
        go_on.clear()
        running = []
        for _ in range(7):
            running.append(asyncio.create_task(called(channel)))
            await asyncio.sleep(0.05)
        go_on.set()
        assert await asyncio.gather(*running) == [[b"x"]] * 7
    assert len(peers) == 3
