from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes.gateway import FakeGateway


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as fake:
        yield fake
