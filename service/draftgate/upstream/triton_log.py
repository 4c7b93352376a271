"""What tritonserver writes: kept within a bound, passed on to logging, and read for the one line
that says why it failed."""

from __future__ import annotations

import logging
import re
from collections import deque

from draftgate.backend.logs import read_log_line
from draftgate.errors import DraftgateError, ErrorCode, from_wire

__all__ = ["ENGINE_LOG", "SERVING_LINE", "TritonLog"]

SERVING_LINE = "Started GRPCInferenceService at"
"""Stands in the line that tritonserver writes once it answers, after all models are loaded."""

ENGINE_LOG = "draftgate.engine"
"""The logger that passes on what the engine logs."""

_LOG = logging.getLogger("draftgate.tritonserver")
_ENGINE_LOG = logging.getLogger(ENGINE_LOG)

_MAX_LINES = 500
_MAX_LINE_CHARACTERS = 2000

_PREFIX = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ +[\w.]+:\d+\] +")
_LEVELS = {
    "I": logging.DEBUG,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}
# What every start without a GPU says.
_HARMLESS = (
    "CudaDriverHelper has not been initialized",
    "CUDA driver version is insufficient for CUDA runtime version",
    "pinned memory pool",
)
_TABLE = ("+-", "| ", "|-")


class TritonLog:
    """The last lines of one run."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Take in a piece of output; the lines that it completed."""
        *lines, self._rest = (self._rest + text).split("\n")
        self._rest = self._rest[:_MAX_LINE_CHARACTERS]
        lines = [line[:_MAX_LINE_CHARACTERS] for line in lines]
        for line in lines:
            self._lines.append(line)
            own = read_log_line(line)
            if own is not None:
                _ENGINE_LOG.log(own[0], "%s", own[1])
            else:
                _LOG.log(_level(line), "%s", _PREFIX.sub("", line).strip('"'))
        return lines

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines kept, oldest first."""
        return tuple(self._lines)

    def failure(self, *, exit_status: int | None) -> DraftgateError:
        """Why the run ended or did not get ready, in one line.

        A model's own error keeps its code; all else is UNAVAILABLE.
        """
        for line in self._lines:
            told = from_wire(_message(line))
            if told is not None:
                return told
        for pattern, form in _DECISIVE:
            for line in self._lines:
                found = pattern.search(_message(line))
                if found is not None:
                    return _unavailable(form.format(*found.groups()))
        errors = [_message(line) for line in self._lines if _level(line) >= logging.ERROR]
        if errors:
            return _unavailable(errors[-1])
        last = next((line for line in reversed(self._lines) if line.strip()), "no output")
        return _unavailable(f"tritonserver ended with status {exit_status}: {last}")


# In this order, because a later line often repeats an earlier one in vaguer words.
_DECISIVE = [
    (
        re.compile(r"Socket '([^']+)' already in use"),
        "cannot listen on {0}: the port is in use, choose another one",
    ),
    (
        re.compile(r"failed to load '([^']+)' .*Stub process '.*' is not healthy"),
        "the process of model '{0}' died while it loaded, most likely for lack of memory",
    ),
    (re.compile(r"failed to load '([^']+)' version \d+: (.*)"), "cannot load model '{0}': {1}"),
    (re.compile(r"Failed to initialize Python stub: (.*)"), "cannot load a model: {0}"),
    (re.compile(r"error while loading shared libraries: (.*)"), "a library is missing: {0}"),
    (re.compile(r"Poll failed for model directory '([^']+)': (.*)"), "model '{0}' is bad: {1}"),
    (re.compile(r"guardian: (a model's process died)"), "{0}"),
    (
        re.compile(r"guardian: tritonserver was ended by signal 9\b"),
        "tritonserver was killed (signal 9), most likely for lack of memory",
    ),
    (re.compile(r"guardian: (tritonserver was ended by signal \d+)"), "{0}"),
    (re.compile(r"error: creating server: (.*)"), "tritonserver cannot start: {0}"),
]


def _level(line: str) -> int:
    own = read_log_line(line)
    if own is not None:
        return own[0]
    found = _PREFIX.match(line)
    if any(text in line for text in _HARMLESS) or line.startswith(_TABLE) or not line.strip():
        return logging.DEBUG
    if found is None:
        return logging.INFO
    return _LEVELS[found[1]]


def _message(line: str) -> str:
    """A line without its prefix, quotes and the traceback that Triton appends."""
    own = read_log_line(line)
    if own is not None:
        return own[1]
    text = _PREFIX.sub("", line).strip().removeprefix('"').removesuffix('"')
    return text.partition("\\n\\nAt:")[0].partition("\\n")[0].strip()


def _unavailable(message: str) -> DraftgateError:
    return DraftgateError(ErrorCode.UNAVAILABLE, message)
