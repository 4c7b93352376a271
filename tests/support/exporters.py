"""Threads that still try to export spans."""

from __future__ import annotations

import threading

__all__ = ["exporters", "wait_for_exporters"]

_NAMES = ("flush-spans", "OtelBatch")


def exporters() -> list[threading.Thread]:
    """Those alive now."""
    return [t for t in threading.enumerate() if t.name.startswith(_NAMES)]


def wait_for_exporters() -> None:
    """Wait until each has given up or is done."""
    for thread in exporters():
        thread.join(60)
    assert not exporters()
