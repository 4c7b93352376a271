"""How the status of a call counts in spans and logs."""

from __future__ import annotations

from draftgate.errors import ErrorCode

__all__ = ["OK", "SERVER_ERRORS"]

OK = "OK"

SERVER_ERRORS = frozenset(
    {
        "UNKNOWN",
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.UNIMPLEMENTED,
        ErrorCode.INTERNAL,
        ErrorCode.UNAVAILABLE,
        "DATA_LOSS",
    }
)
"""The caller's faults and wishes are no errors of the server (semantic conventions for gRPC)."""
