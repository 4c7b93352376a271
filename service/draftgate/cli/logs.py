"""Where a service's logs go, how, and how much of them."""

from __future__ import annotations

import logging

from draftgate.cli.render import LogFormatter

__all__ = ["log_to_stderr", "set_log_level"]


def log_to_stderr(level: str, form: str) -> None:
    """Have this level and worse on stderr: as `text` or as `json`, one object a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(form))
    logging.basicConfig(handlers=[handler])
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Log this level and worse; of libraries no more than warnings."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("draftgate").setLevel(number)
    logging.getLogger().setLevel(max(number, logging.WARNING))


def _formatter(form: str) -> logging.Formatter:
    if form == "text":
        return LogFormatter()
    # Only a service needs it; other commands start faster without it.
    from draftgate.telemetry.logs import JsonLines

    return JsonLines()
