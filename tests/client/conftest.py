from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from draftgate.gateway import Gateway
from tests.fakes.triton import FakeTriton
from tests.fakes.wire import FakeWire
from tests.support.clients import KINDS, Opened, opened
from tests.support.gateway import running_gateway


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def gateway(triton: FakeTriton) -> AsyncIterator[Gateway]:
    async with running_gateway(triton.target) as running:
        yield running


@pytest.fixture
async def client(gateway: Gateway, kind: str) -> AsyncIterator[Opened]:
    """Both kinds, of a real gateway."""
    async with opened(kind, f"127.0.0.1:{gateway.port}") as found:
        await found.wait_serving(timeout_s=30)
        yield found


@pytest.fixture
async def wire() -> AsyncIterator[FakeWire]:
    async with FakeWire() as server:
        yield server


@pytest.fixture
async def scripted(wire: FakeWire, kind: str) -> AsyncIterator[Opened]:
    """Both kinds, of a server that says what it is told to."""
    async with opened(kind, wire.address, timeout_s=30) as found:
        yield found
