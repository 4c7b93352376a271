"""The record beside a prepared checkpoint: what it was made from and what must be in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftgate import __version__
from draftgate.checkpoint.files import read_json, sha256, write_json
from draftgate.checkpoint.hf_source import source_files
from draftgate.checkpoint.quantise import tool_versions
from draftgate.errors import DraftgateError

__all__ = ["MANIFEST_FILE", "SourceIdentity", "fault", "identify", "write_manifest"]

MANIFEST_FILE = "draftgate-manifest.json"

_RECIPE = 1
"""Raised whenever the same source would give another checkpoint."""


@dataclass(frozen=True)
class SourceIdentity:
    """Which source a checkpoint came from, independent of where it lies."""

    name: str
    """Name of the file or folder."""
    bytes: int
    """Size of everything that decides the checkpoint."""
    sha256: str
    """Digest of a GGUF file, or of the names and digests of a folder's files."""


def identify(source: Path) -> SourceIdentity:
    """Hash a GGUF file or a Hugging Face folder.

    Raises `DraftgateError` (FAILED_PRECONDITION) if a folder has no safetensors.
    """
    name = source.resolve().name
    if not source.is_dir():
        return SourceIdentity(name, source.stat().st_size, sha256(source))
    files = source_files(source)
    lines = "".join(f"{file.name} {sha256(file)}\n" for file in files)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return SourceIdentity(name, sum(file.stat().st_size for file in files), digest)


def write_manifest(folder: Path, source: SourceIdentity) -> None:
    """Record every file now in `folder`."""
    files = {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)}
        for file in sorted(folder.iterdir())
    }
    manifest = {
        "recipe": _RECIPE,
        "draftgate_version": __version__,
        "source": {"name": source.name, "bytes": source.bytes, "sha256": source.sha256},
        "tools": tool_versions(),
        "files": files,
    }
    write_json(folder / MANIFEST_FILE, manifest)


def fault(folder: Path, source: SourceIdentity) -> str:
    """Why `folder` is not the checkpoint of `source`, in a few words; empty if it is."""
    try:
        manifest = read_json(folder / MANIFEST_FILE)
        if manifest["recipe"] != _RECIPE:
            return "it was prepared by another version of Draftgate"
        if manifest["source"]["sha256"] != source.sha256:
            return f"it was prepared from another source ({manifest['source']['name']})"
        files = _listed(manifest)
    except (FileNotFoundError, NotADirectoryError):
        return "it has no manifest"
    except (DraftgateError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    return _damage(folder, files)


def damage(folder: Path) -> str:
    """What in `folder` is not as its manifest says, in a few words; empty if all is, or if it has
    no manifest: somebody else made it."""
    if not (folder / MANIFEST_FILE).is_file():
        return ""
    try:
        manifest = read_json(folder / MANIFEST_FILE)
        files = _listed(manifest)
    except (DraftgateError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST_FILE} is damaged"
    return _damage(folder, files)


def _listed(manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    return {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}


def _damage(folder: Path, files: Mapping[str, tuple[int, str]]) -> str:
    if not files:
        return f"{MANIFEST_FILE} is damaged"
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
        if sha256(file) != digest:
            return f"{name} is damaged"
    return ""
