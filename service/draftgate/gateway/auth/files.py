"""Whether a file has changed."""

from __future__ import annotations

from pathlib import Path

__all__ = ["stamp"]


def stamp(path: Path) -> tuple[int, int, int] | None:
    """Differs when the file does; None while it is missing.

    Mounted secrets change by a link that is turned to another file: the link is followed.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
