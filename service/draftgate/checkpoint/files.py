"""JSON files, digests, and what the file system reports."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["bad_file", "disk_errors", "read_json", "sha256", "write_json"]

_FULL = (errno.ENOSPC, errno.EDQUOT)


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object; FAILED_PRECONDITION if it does not."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_file(path, f"is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise bad_file(path, "does not hold a JSON object")
    return parsed


def write_json(path: Path, content: object) -> None:
    """Write indented JSON, readable as text."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bad_file(path: Path, problem: str) -> DraftgateError:
    """A file or folder that cannot be used as it is."""
    return DraftgateError(ErrorCode.FAILED_PRECONDITION, f"{path}: {problem}")


@contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn what the file system reports while `place` is written into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(place) from error
        file = Path(error.filename or place)
        raise bad_file(file, f"cannot be used: {error.strerror or error}") from error
    except Exception as error:
        # safetensors reports a failed write as an error of its own, with the system's text in it.
        if f"os error {errno.ENOSPC}" in str(error):
            raise _disk_full(place) from error
        raise


def _disk_full(place: Path) -> DraftgateError:
    return DraftgateError(
        ErrorCode.RESOURCE_EXHAUSTED,
        f"the disk filled up while {place} was written; free some space there",
    )
