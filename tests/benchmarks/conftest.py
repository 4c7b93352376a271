from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.eagle import write_drafter
from tests.support.spoken import write_spoken_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A tiny model is slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def spoken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template."""
    return write_spoken_model(tmp_path_factory.mktemp("benchmarked") / "spoken")


@pytest.fixture(scope="session")
def spoken_head(spoken_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for it with random weights."""
    return write_drafter(
        tmp_path_factory.mktemp("benchmarked") / "head", spoken_model, draft_vocab=64
    )
