"""JSON files and digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["bad_file", "read_json", "sha256", "write_json"]


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
