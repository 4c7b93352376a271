"""The doctor's checks of what `serve` runs, each with something broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftgate.cli.doctor.parts import check_drafter, check_model, check_triton, memory_needed
from draftgate.cli.doctor.result import Verdict
from draftgate.upstream import triton_install
from tests.conftest import DRAFTER_DIR


def test_triton_is_found() -> None:
    found = check_triton()
    assert found.verdict is Verdict.OK
    assert "libpython" in found.found


def test_a_part_of_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_install, "_LIBPYTHON", "libpython9.9.so.1.0")
    found = check_triton()
    assert found.verdict is Verdict.FAIL
    assert found.found.startswith("libpython9.9.so.1.0 is missing: apt-get install")


def test_the_packaged_model_and_its_drafter_fit(checkpoint_dir: Path) -> None:
    model = check_model(checkpoint_dir, made_by_serve=False)
    assert (model.verdict, model.remedy) == (Verdict.OK, "")
    assert "LlamaForCausalLM, 30 layers" in model.found
    assert check_drafter(DRAFTER_DIR, checkpoint_dir).verdict is Verdict.OK
    assert memory_needed(checkpoint_dir) > 2**30


def test_a_model_that_is_missing_fails_unless_serve_makes_it(tmp_path: Path) -> None:
    assert check_model(tmp_path, made_by_serve=False).verdict is Verdict.FAIL
    made = check_model(tmp_path, made_by_serve=True)
    assert (made.verdict, made.remedy) == (Verdict.WARN, "the first `serve` prepares it")


def test_a_damaged_model_fails_whoever_made_it(tmp_path: Path, checkpoint_dir: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint_dir / name)
    found = check_model(tmp_path, made_by_serve=True)
    assert found.verdict is Verdict.FAIL
    assert "has no tokenizer.json" in found.found


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A copy of the shipped one, its weights as a link."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    shutil.copy(DRAFTER_DIR / "config.json", folder)
    (folder / "model.safetensors").symlink_to(DRAFTER_DIR / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": 64}, "its hidden_size is 64, the model's is 576"),
        ({"vocab_size": 32000}, "its vocab_size is 32000, the model's is 49152"),
        ({"target_vocabulary_sha256": "0" * 64}, "it was made for another tokenizer"),
    ],
)
def test_a_drafter_of_another_model_fails(
    drafter: Path, checkpoint_dir: Path, changes: dict[str, Any], problem: str
) -> None:
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, **changes}))
    found = check_drafter(drafter, checkpoint_dir)
    assert (found.verdict, found.found) == (Verdict.FAIL, f"{drafter}: {problem}")


def test_a_drafter_without_weights_or_without_anything_fails(
    drafter: Path, checkpoint_dir: Path, tmp_path: Path
) -> None:
    (drafter / "model.safetensors").unlink()
    assert "holds no .safetensors file" in check_drafter(drafter, checkpoint_dir).found
    nothing = check_drafter(tmp_path / "nowhere", checkpoint_dir)
    assert nothing.verdict is Verdict.FAIL
    assert "cannot read" in nothing.found
