from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from draftgate.gateway import Gateway
from tests.fakes.triton import FakeTriton
from tests.support.gateway import Client, connected, running_gateway


@pytest.fixture
async def gateway(triton: FakeTriton) -> AsyncIterator[Gateway]:
    async with running_gateway(triton.target) as running:
        yield running


@pytest.fixture
async def second() -> AsyncIterator[FakeTriton]:
    """Another Triton, for gateways with two replicas."""
    fake = FakeTriton()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[Client]:
    async with connected(gateway) as found:
        await found.wait_serving()
        yield found
