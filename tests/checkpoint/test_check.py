"""A folder is looked over before anything is started on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from draftgate.checkpoint import check_checkpoint
from draftgate.errors import DraftgateError, ErrorCode


@pytest.fixture
def folder(checkpoint_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_dir, tmp_path / "model"))


def test_a_prepared_folder_is_fine(folder: Path) -> None:
    check_checkpoint(folder)


def flip_a_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(120_000_000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)


def other_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    (folder / "config.json").write_text(json.dumps(config))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("harm", "code", "said"),
    [
        (flip_a_byte, ErrorCode.FAILED_PRECONDITION, "model.safetensors is damaged"),
        (truncate, ErrorCode.FAILED_PRECONDITION, "model.safetensors has 1000000 of"),
        (without("tokenizer.json"), ErrorCode.FAILED_PRECONDITION, "tokenizer.json"),
        (without("model.safetensors"), ErrorCode.FAILED_PRECONDITION, "no .safetensors file"),
        (without("config.json"), ErrorCode.NOT_FOUND, "config.json is missing"),
        (other_architecture, ErrorCode.UNIMPLEMENTED, "GPTNeoXForCausalLM"),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, harm: Callable[[Path], None], code: ErrorCode, said: str
) -> None:
    harm(folder)
    with pytest.raises(DraftgateError) as caught:
        check_checkpoint(folder)
    assert caught.value.code is code
    assert said in caught.value.message
    assert "\n" not in caught.value.message
