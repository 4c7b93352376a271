"""What the engine logs, on its way out of tritonserver: lines of its log, marked as ours.

The backend's process writes them to the error stream that it shares with tritonserver; whoever runs
tritonserver reads them there again.
"""

from __future__ import annotations

import logging
import re

__all__ = ["log_to_server", "read_log_line"]

_LOGGER = "draftgate"
_FORM = "draftgate %(levelname)s: %(message)s"
_LINE = re.compile(r"draftgate (DEBUG|INFO|WARNING|ERROR|CRITICAL): (.*)")


def log_to_server() -> None:
    """Let this process write what it logs, from INFO on."""
    logger = logging.getLogger(_LOGGER)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORM))
        logger.addHandler(handler)


def read_log_line(line: str) -> tuple[int, str] | None:
    """The level and the message of a line that `log_to_server` wrote; None for any other."""
    found = _LINE.match(line)
    return None if found is None else (logging.getLevelNamesMapping()[found[1]], found[2])
