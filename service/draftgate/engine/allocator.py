"""The C library's memory, kept from one step to the next.

A step over many tokens takes and frees tens of megabytes of activations and logits. By default
glibc hands such blocks back to the kernel at once and asks for them again a moment later, a page
fault for every 4 KiB.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

# The numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

_KEPT_BYTES = 1 << 30
_GROWN_BYTES = 128 << 20
"""More than one heap of a thread's arena (64 MiB), so that those are not handed back either."""


def keep_freed_memory() -> None:
    """Have this process keep what it frees, for good; without effect on another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_TOP_PAD, _GROWN_BYTES)
