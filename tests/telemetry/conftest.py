from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.collector import Collector


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    found = Collector()
    await found.start()
    yield found
    await found.stop()
