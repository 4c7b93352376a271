from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.gateway import FakeGateway
from tests.support.footprint import Footprint


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with FakeGateway() as fake:
        yield fake


@pytest.fixture
def footprint(tmp_path: Path) -> Footprint:
    (tmp_path / "tmp").mkdir()
    return Footprint(tmp_path / "tmp")
