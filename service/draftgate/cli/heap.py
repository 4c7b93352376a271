"""Short pauses of the garbage collector."""

from __future__ import annotations

import gc

__all__ = ["freeze_heap"]


def freeze_heap() -> None:
    """Have the collector leave alone what is there now: modules, classes, settings.

    That is nearly all that a service ever holds, and to look through it again and again stops every
    stream for a tenth of a second at a time.
    """
    gc.collect()
    gc.freeze()
