"""Prepared checkpoints on disk: built aside, moved into place whole, checked before each use."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftgate.checkpoint.files import disk_errors
from draftgate.checkpoint.layout import check_layout, checkpoint_bytes
from draftgate.checkpoint.manifest import (
    MANIFEST_FILE,
    SourceIdentity,
    fault,
    identify,
    write_manifest,
)
from draftgate.checkpoint.progress import Progress
from draftgate.checkpoint.quantise import quantise
from draftgate.checkpoint.source import Source, open_source
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["ensure_checkpoint", "prepare"]


def ensure_checkpoint(source: Path, out: Path, *, progress: Progress) -> Path:
    """Return `out`, holding the FP8 checkpoint of `source`; prepare it unless it is there whole.

    What is there is checked by size and SHA-256. Safe to call from several processes at once.
    Raises `DraftgateError` as `prepare` does.
    """
    progress.stage("checking", 1)
    with disk_errors(out):
        identity = _identify(source)
        if not fault(out, identity):
            return out
    with _locked(out, progress):
        # Another process may have built it while this one waited.
        with disk_errors(out):
            problem = fault(out, identity)
        if problem:
            if (out / MANIFEST_FILE).exists():
                progress.note(f"{out}: {problem}; preparing it again")
            _build(source, identity, out, progress)
    return out


def prepare(source: Path, out: Path, *, progress: Progress) -> None:
    """Prepare the FP8 checkpoint of a GGUF file or a Hugging Face folder and put it at `out`.

    `out` appears whole or not at all; a checkpoint already there is replaced.
    Raises `DraftgateError`: NOT_FOUND without a source, UNIMPLEMENTED for a model that is not
    supported, ALREADY_EXISTS when `out` holds something else, RESOURCE_EXHAUSTED when the disk
    is full, FAILED_PRECONDITION for files that cannot be read or written.
    """
    with disk_errors(out):
        identity = _identify(source)
    with _locked(out, progress):
        _build(source, identity, out, progress)


def _identify(path: Path) -> SourceIdentity:
    if not path.exists():
        raise DraftgateError(
            ErrorCode.NOT_FOUND, f"{path}: no such file or folder; give a GGUF file or a folder"
        )
    return identify(path)


def _build(source_path: Path, identity: SourceIdentity, out: Path, progress: Progress) -> None:
    """Build beside `out` and move into place. The lock is held."""
    if out.exists() and not (out / MANIFEST_FILE).exists() and not _is_empty_folder(out):
        raise DraftgateError(
            ErrorCode.ALREADY_EXISTS,
            f"{out} holds something that is not a prepared checkpoint; "
            "choose another place or remove it",
        )
    building, replaced = _beside(out, "building"), _beside(out, "replaced")
    with disk_errors(out):
        _remove(building)
        _remove(replaced)
        progress.stage("reading", 1)
        source = open_source(source_path)
        _check_space(source, out)
        building.mkdir()
        try:
            quantise(source, building, progress=progress)
            progress.stage("verifying", 1)
            check_layout(building)
            write_manifest(building, identity)
            _settle(building)
            progress.advance()
            if out.exists():
                out.rename(replaced)
            building.rename(out)
            _sync(out.parent)
        finally:
            _remove(building)
        _remove(replaced)


def _check_space(source: Source, out: Path) -> None:
    needed = checkpoint_bytes(source.shape)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise DraftgateError(
            ErrorCode.RESOURCE_EXHAUSTED,
            f"preparing {out} needs {_megabytes(needed)} free on {out.parent}, "
            f"only {_megabytes(free)} are; free some or choose another place",
        )


@contextmanager
def _locked(out: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file beside `out`. The kernel lets go of it if this process dies."""
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        file = _beside(out, "lock").open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"{out}: waiting for another process that is preparing it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _settle(folder: Path) -> None:
    """One access mode for all files, and everything on the disk."""
    mode = (folder / MANIFEST_FILE).stat().st_mode
    for file in folder.iterdir():
        file.chmod(mode)
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _beside(out: Path, role: str) -> Path:
    return out.parent / f".{out.name}.{role}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"
