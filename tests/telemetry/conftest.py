from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.fakes.collector import Collector
from tests.fakes.triton import FakeTriton


@pytest.fixture
async def triton() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    await found.start()
    yield found
    await found.stop()
