from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.fakes.triton import FakeTriton

from draftgate.upstream.client import TritonClient, TritonClientConfig


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def upstream(triton: FakeTriton) -> AsyncIterator[TritonClient]:
    client = TritonClient(TritonClientConfig(triton.target, drain_timeout_s=0.2))
    yield client
    await client.close()
