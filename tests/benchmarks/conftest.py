from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.eagle import write_drafter
from tests.support.tiny_models import TINY, write_checkpoint

SPOKEN = {**TINY, "vocab_size": 256, "eos_token_id": None}
"""A tiny model whose tokens are bytes, and whose answers are as long as they may be."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A tiny model is slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def spoken_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`SPOKEN` with a tokenizer and a chat template."""
    folder = write_checkpoint(tmp_path_factory.mktemp("benchmarked") / "spoken", SPOKEN)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.fixture(scope="session")
def spoken_head(spoken_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head for it with random weights."""
    return write_drafter(
        tmp_path_factory.mktemp("benchmarked") / "head", spoken_model, draft_vocab=64
    )
