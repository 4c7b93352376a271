from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from draftgate.engine import Target, load_target
from draftgate.text import Tokenizer
from draftgate.text.chat import Message
from tests.support.eagle import write_drafter
from tests.support.engine import greedy, running
from tests.support.tiny_models import TINY, write_checkpoint

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.json"
TOKENS = 64
"""Greedy tokens compared for every prompt."""
CORES = len(os.sched_getaffinity(0))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """A tiny model is slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fitting_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    with threads(CORES if "target" in request.fixturenames else 1):
        yield


@pytest.fixture(scope="session")
def target(checkpoint_dir: Path) -> Target:
    """The packaged model in fp32."""
    return load_target(checkpoint_dir, torch.float32)


@pytest.fixture(scope="session")
def prompts(checkpoint_dir: Path) -> dict[str, list[int]]:
    """40 real prompts as ids, by name."""
    tokenizer = Tokenizer.load(checkpoint_dir)
    loaded = {}
    for prompt in json.loads(PROMPTS.read_text(encoding="utf-8")):
        if "messages" in prompt:
            ids = tokenizer.encode_chat([Message(**message) for message in prompt["messages"]])
        else:
            ids = tokenizer.encode_prompt(prompt["text"])
        loaded[prompt["name"]] = ids
    assert len(loaded) == 40
    return loaded


@pytest.fixture(scope="session")
def together(
    target: Target, prompts: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[int]]:
    """Each prompt's greedy tokens, from one batch without speculation. Of all processes of a run
    one works them out."""
    folder = tmp_path_factory.getbasetemp()
    file = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "together.json"
    with FileLock(file.with_suffix(".lock")):
        if not file.is_file():
            with threads(CORES), running(target, drafter="none") as engine:
                file.write_text(json.dumps(engine.run(prompts, greedy(TOKENS))), encoding="utf-8")
    found: dict[str, list[int]] = json.loads(file.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="session")
def any_drafter(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 folder for the packaged model; its weights are random, so it is hardly right."""
    folder = tmp_path_factory.mktemp("eagle") / "drafter"
    return write_drafter(folder, checkpoint_dir, draft_vocab=512, taps=None)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A random model of a few thousand weights in fp32: for what does not depend on real text."""
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", TINY)
    return load_target(folder, torch.float32)
