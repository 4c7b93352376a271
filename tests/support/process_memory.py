"""What a process holds."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Memory that is this process's own: not the files it has mapped."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")
