"""What a client has for itself, and what is left of it when it is closed."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from draftgate.client import AsyncClient, CallError, ErrorCode
from tests.fakes.wire import End, FakeWire, Hang
from tests.support.clients import opened


async def test_each_client_has_a_connection_of_its_own(wire: FakeWire, kind: str) -> None:
    """So that those of one process come to different workers of a gateway."""
    async with opened(kind, wire.address) as first, opened(kind, wire.address) as second:
        for client in (first, second, first):
            await client.model()
    one, other, again = (call.peer for call in wire.calls)
    assert one == again != other


async def test_a_client_that_was_closed_says_so(wire: FakeWire, kind: str) -> None:
    async with opened(kind, wire.address) as client:
        wire.scripts.append([Hang()])
        running = client.generate("Hi")
        await wire.wait_for(lambda: len(wire.calls) == 1)
    with pytest.raises(CallError) as caught:
        await running.text()
    assert caught.value.code is ErrorCode.CANCELLED

    for ask in (client.model, client.health, client.gate.state, client.admin.replicas):
        with pytest.raises(CallError, match="the client has been closed") as caught:
            await ask()
        assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    with pytest.raises(CallError, match="the client has been closed"):
        await client.generate_once("Hi")
    with pytest.raises(CallError, match="the client has been closed"):
        client.generate("Hi")
    for follow in (client.watch_health, client.gate.watch, client.gate.watch_steps):
        with pytest.raises(CallError, match="the client has been closed"):
            follow()
    await client.close()
    assert len(wire.calls) == 1


async def test_what_waits_to_be_tried_again_ends_with_the_client(wire: FakeWire, kind: str) -> None:
    full = End(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0.5)
    wire.scripts += [[full], [full]]
    async with opened(kind, wire.address) as client:
        waiting = [
            asyncio.create_task(ask) for ask in (client.generate("Hi").text(), client.model())
        ]
        await wire.wait_for(lambda: len(wire.calls) == 2)
        await client.close()
        for each in waiting:
            with pytest.raises(CallError, match=r"closed|cancelled|Channel"):
                await each
    assert len(wire.calls) == 2


async def test_a_session_of_a_closed_client_does_not_begin(wire: FakeWire) -> None:
    async with AsyncClient(wire.address) as client:
        session = client.session()
    with pytest.raises(CallError, match="the client has been closed"):
        async with session:
            pass
    assert wire.calls == []
