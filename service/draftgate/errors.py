"""Every failure Draftgate reports: one class, one closed set of codes, one wire form.

The engine runs behind Triton, whose own error codes lack RESOURCE_EXHAUSTED and DEADLINE_EXCEEDED
and whose streams report some errors as text alone. So an engine error travels as text that starts
with a marker and the code; `from_wire` finds it again wherever a log tag or an ensemble's name was
put in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "DraftgateError",
    "ErrorCode",
    "Refusal",
    "deadline_passed",
    "from_wire",
    "invalid_argument",
    "joined",
    "shutting_down",
    "to_wire",
]


class ErrorCode(StrEnum):
    """The canonical gRPC codes that Draftgate uses, by name."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True)
class Refusal:
    """What a caller needs to know when a limit turned its request away."""

    reason: str
    """Which limit, in upper snake case."""
    subject: str
    """Whose limit it is, such as `server` or `tenant:acme`."""
    retry_after_s: float
    """When trying again is likely to succeed."""


class DraftgateError(Exception):
    """A failure with a code and a message fit for the caller.

    `field` names the request field at fault, dotted from the request's root, or is empty. `refusal`
    is there when nothing is wrong with the request but a limit.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, field: str = "", refusal: Refusal | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.refusal = refusal


def invalid_argument(field: str, value: object, allowed: str) -> DraftgateError:
    """The one form of a bad-input message: the field, the value and the allowed range."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return DraftgateError(
        ErrorCode.INVALID_ARGUMENT, f"{field}: got {shown}, allowed: {allowed}", field=field
    )


def shutting_down() -> DraftgateError:
    """What a server that takes nothing new says."""
    return DraftgateError(ErrorCode.UNAVAILABLE, "the server is shutting down")


def deadline_passed() -> DraftgateError:
    """What a generation that ran out of time ends with."""
    return DraftgateError(
        ErrorCode.DEADLINE_EXCEEDED, "the deadline passed before the generation was complete"
    )


_WIRE = re.compile(
    r"\[draftgate:(?P<code>[A-Z_]+)(?::(?P<field>[\w.\[\]]*))?\] (?P<message>.*)", re.S
)


def joined(problems: Sequence[DraftgateError]) -> DraftgateError:
    """One error that tells all of them, of which there is at least one."""
    if len(problems) == 1:
        return problems[0]
    message = "; ".join(each.message for each in problems)
    return DraftgateError(ErrorCode.INVALID_ARGUMENT, message)


def to_wire(error: DraftgateError) -> str:
    """Text of a Triton error that `from_wire` reads back."""
    return f"[draftgate:{error.code.value}:{error.field}] {error.message}"


def from_wire(text: str) -> DraftgateError | None:
    """The error that `to_wire` wrote, found anywhere in `text`; None if there is none."""
    found = _WIRE.search(text)
    if found is None or found["code"] not in ErrorCode.__members__:
        return None
    return DraftgateError(ErrorCode(found["code"]), found["message"], field=found["field"] or "")
