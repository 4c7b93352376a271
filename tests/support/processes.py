"""What runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["processes_of_group"]


def processes_of_group(group: int) -> dict[int, str]:
    """The processes of a process group, zombies included, and what each runs."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.getpgid(int(entry)) == group:
                found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().split("\0")[0]
        except (ProcessLookupError, FileNotFoundError):
            continue  # it ended in this moment
    return found
