from __future__ import annotations

import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from draftgate.checkpoint import SilentProgress, ensure_checkpoint, prepare
from draftgate.checkpoint.files import disk_errors
from draftgate.errors import DraftgateError, ErrorCode

MANIFEST = "draftgate-manifest.json"


class Recorder(SilentProgress):
    """Keeps what a preparation tells its user."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []

    def stage(self, name: str, total: int) -> None:
        self.stages.append(name)

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def source(make_hf: Callable[..., Path]) -> Path:
    return make_hf("LlamaForCausalLM", "source")


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    """A whole checkpoint of `source`."""
    return ensure_checkpoint(source, tmp_path / "place" / "out", progress=SilentProgress())


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def remove_a_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def garble_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"recipe": ')


def empty_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def unlist_the_files(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))


def use_another_recipe(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "recipe": 0}))


def test_a_whole_checkpoint_is_only_checked(source: Path, out: Path) -> None:
    before, progress = contents(out), Recorder()

    assert ensure_checkpoint(source, out, progress=progress) == out

    assert progress.stages == ["checking"]
    assert progress.notes == []
    assert contents(out) == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "model.safetensors has 1000 of"),
        (flip_a_byte, "model.safetensors is damaged"),
        (remove_a_file, "tokenizer.json is missing"),
        (garble_the_manifest, "draftgate-manifest.json is damaged"),
        (empty_the_manifest, "draftgate-manifest.json is damaged"),
        (unlist_the_files, "draftgate-manifest.json is damaged"),
        (use_another_recipe, "another version of Draftgate"),
    ],
)
def test_a_broken_checkpoint_is_rebuilt_and_the_reason_given(
    damage: Callable[[Path], None], reason: str, source: Path, out: Path
) -> None:
    before, progress = contents(out), Recorder()
    damage(out)

    ensure_checkpoint(source, out, progress=progress)

    assert contents(out) == before
    [note] = progress.notes
    assert reason in note
    assert "\n" not in note
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.lock", "out"]


def test_another_source_is_another_checkpoint(
    source: Path, out: Path, make_hf: Callable[..., Path]
) -> None:
    before, progress = contents(out), Recorder()
    other = make_hf("Qwen2ForCausalLM", "other")

    ensure_checkpoint(other, out, progress=progress)

    assert "prepared from another source (source)" in progress.notes[0]
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2"
    assert contents(out)["model.safetensors"] != before["model.safetensors"]


def test_a_moved_source_is_the_same_source(source: Path, out: Path, tmp_path: Path) -> None:
    progress = Recorder()
    moved = source.rename(tmp_path / "elsewhere")

    ensure_checkpoint(moved, out, progress=progress)

    assert progress.stages == ["checking"]


def test_a_killed_build_leaves_nothing_that_counts(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    script = f"""
import os, signal
from pathlib import Path
from draftgate.checkpoint import SilentProgress, prepare
class Killer(SilentProgress):
    def stage(self, name, total):
        if name == "verifying":
            os.kill(os.getpid(), signal.SIGKILL)
prepare(Path({str(source)!r}), Path({str(out)!r}), progress=Killer())
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert (out.parent / ".out.building" / "model.safetensors").exists()

    ensure_checkpoint(source, out, progress=SilentProgress())

    assert (out / MANIFEST).exists()
    assert sorted(path.name for path in out.parent.iterdir()) == [".out.lock", "out"]


@pytest.mark.parametrize("moment", ["converting", "quantising", "writing", "verifying"])
def test_an_interrupt_leaves_no_folder(moment: str, source: Path, tmp_path: Path) -> None:
    class Interrupted(SilentProgress):
        def stage(self, name: str, total: int) -> None:
            if name == moment:
                raise KeyboardInterrupt

    place = tmp_path / "place"
    with pytest.raises(KeyboardInterrupt):
        prepare(source, place / "out", progress=Interrupted())
    assert [path.name for path in place.iterdir()] == [".out.lock"]


def test_an_interrupted_rebuild_keeps_the_old_checkpoint(source: Path, out: Path) -> None:
    class Interrupted(SilentProgress):
        def stage(self, name: str, total: int) -> None:
            if name == "verifying":
                raise KeyboardInterrupt

    before = contents(out)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, progress=Interrupted())
    assert contents(out) == before


def test_two_builders_build_once(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    second_waits, first_holds = threading.Event(), threading.Event()

    class First(Recorder):
        def stage(self, name: str, total: int) -> None:
            super().stage(name, total)
            if name == "reading":
                first_holds.set()
                assert second_waits.wait(60)

    class Second(Recorder):
        def note(self, message: str) -> None:
            super().note(message)
            second_waits.set()

    first, second = First(), Second()
    builder = threading.Thread(
        target=ensure_checkpoint, args=(source, out), kwargs={"progress": first}
    )
    builder.start()
    assert first_holds.wait(60)
    ensure_checkpoint(source, out, progress=second)
    builder.join()

    assert "quantising" in first.stages
    assert second.stages == ["checking"]
    assert "waiting for another process" in second.notes[0]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_ours_is_never_overwritten(kind: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("mine")

    for build in (prepare, ensure_checkpoint):
        with pytest.raises(DraftgateError, match="choose another place") as refusal:
            build(source, out, progress=SilentProgress())
        assert refusal.value.code is ErrorCode.ALREADY_EXISTS
    assert (out if kind == "file" else out / "thesis.txt").read_text() == "mine"


def test_an_empty_folder_is_used(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    ensure_checkpoint(source, out, progress=SilentProgress())

    assert (out / MANIFEST).exists()


def test_missing_space_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = collections.namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1_000_000))

    with pytest.raises(DraftgateError, match=r"needs 34 MB free on .*, only 1 MB are") as refusal:
        prepare(source, tmp_path / "place" / "out", progress=SilentProgress())

    assert refusal.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert [path.name for path in (tmp_path / "place").iterdir()] == [".out.lock"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs Linux's /dev/full")
def test_a_disk_that_fills_up_is_one_clear_error() -> None:
    with (
        pytest.raises(DraftgateError, match="the disk filled up while model") as refusal,
        disk_errors(Path("model")),
    ):
        Path("/dev/full").write_text("x")
    assert refusal.value.code is ErrorCode.RESOURCE_EXHAUSTED


def test_a_place_that_cannot_be_a_folder_is_one_clear_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(DraftgateError, match=r"file.*: cannot be used: (Not a dir|File exists)"):
        ensure_checkpoint(source, tmp_path / "file" / "out", progress=SilentProgress())


def test_a_missing_source_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="no such file or folder") as refusal:
        ensure_checkpoint(tmp_path / "absent", tmp_path / "out", progress=SilentProgress())
    assert refusal.value.code is ErrorCode.NOT_FOUND
    assert list(tmp_path.iterdir()) == []
