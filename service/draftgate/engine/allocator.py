"""What the C library does with memory that is freed. On another one than glibc nothing changes."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory", "return_freed_memory"]

# The numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

_KEPT_BYTES = 1 << 30
_GROWN_BYTES = 128 << 20
"""More than one heap of a thread's arena (64 MiB), so that those are not handed back either."""


def return_freed_memory() -> None:
    """Give the system what loading has freed, a third of the weights: it would be kept."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def keep_freed_memory() -> None:
    """From now on keep what is freed, in this process: a step over many tokens takes and frees tens
    of megabytes, and would hand them back to the kernel and ask for them again a moment later, with
    a page fault for every 4 KiB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TOP_PAD, _GROWN_BYTES)
