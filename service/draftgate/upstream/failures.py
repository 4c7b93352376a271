"""What Triton reports as failed -> DraftgateError.

Triton's streams carry many errors as text alone, and its code UNAVAILABLE stands for things as
different as a full queue and a wrong access header, so the text decides. It is no contract of
Triton's: texts that are not listed fall back to the code they came with.
"""

from __future__ import annotations

import logging
from typing import Protocol

import grpc

from draftgate.errors import DraftgateError, ErrorCode, from_wire
from draftgate.upstream.complaint import Novelty

__all__ = ["RpcStatus", "as_told", "from_rpc_error", "from_text", "in_tritons_words", "means_lost"]

_log = logging.getLogger(__name__)
_novelty = Novelty()

# Substrings, first match wins: an ensemble and log tags put their names in front.
_TEXTS: tuple[tuple[str, ErrorCode, str], ...] = (
    ("Exceeds maximum queue size", ErrorCode.RESOURCE_EXHAUSTED, "the model's queue is full"),
    (
        "Request timeout expired",
        ErrorCode.RESOURCE_EXHAUSTED,
        "the request waited too long in the model's queue",
    ),
    ("GRPC server is shutting down", ErrorCode.UNAVAILABLE, "the model server is shutting down"),
    ("Server exiting", ErrorCode.UNAVAILABLE, "the model server is shutting down"),
    ("Server not ready", ErrorCode.UNAVAILABLE, "the model server is not ready"),
    ("is not at ready state", ErrorCode.UNAVAILABLE, "the model is loading or unloading"),
    ("has no available versions", ErrorCode.UNAVAILABLE, "the model is not loaded"),
    ("Stub process", ErrorCode.UNAVAILABLE, "the model's process ended"),
    # gRPC's own words for a connection that broke under a call; the status that comes with them
    # differs.
    ("RST_STREAM", ErrorCode.UNAVAILABLE, "the connection to the model server broke"),
    ("Stream removed", ErrorCode.UNAVAILABLE, "the connection to the model server broke"),
    (
        "This protocol is restricted, expecting header",
        ErrorCode.FAILED_PRECONDITION,
        "the model server refuses the gateway: its access header is missing or wrong",
    ),
    ("Request for unknown model", ErrorCode.NOT_FOUND, "the model server has no such model"),
    (
        "unexpected inference input",
        ErrorCode.INTERNAL,
        "the model server's models do not fit the gateway's tensor contract",
    ),
)

_CALLERS_FAULTS = (
    *("unexpected inference input", "unexpected inference output", "unexpected shape for input"),
    *("unexpected total byte size", "data-type is '", "expected tensors for", " inputs but got "),
    *(" is reserved", "has an unsupported type"),
)
"""What Triton says of requests that do not fit the model; it says it in band, without a code."""

_CODES = {
    grpc.StatusCode.UNAVAILABLE: (ErrorCode.UNAVAILABLE, "the model server cannot be reached"),
    grpc.StatusCode.CANCELLED: (ErrorCode.UNAVAILABLE, "the model server ended the call"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        ErrorCode.DEADLINE_EXCEEDED,
        "the model server did not answer in time",
    ),
    grpc.StatusCode.UNIMPLEMENTED: (
        ErrorCode.UNIMPLEMENTED,
        "the model server does not speak the streaming inference protocol",
    ),
}


def from_text(text: str) -> DraftgateError:
    """The error behind an in-band message, INTERNAL if nothing is known about it."""
    return _known(text) or _unknown(ErrorCode.INTERNAL, "the model server failed", text)


class RpcStatus(Protocol):
    """What a failed call tells of itself."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...


def from_rpc_error(error: RpcStatus) -> DraftgateError:
    """The error behind a call that ended with a status other than OK."""
    text = error.details() or ""
    known = _known(text)
    if known is not None:
        return known
    code, message = _CODES.get(error.code(), (ErrorCode.INTERNAL, "the model server failed"))
    return _unknown(code, message, f"{error.code().name}: {text}")


def in_tritons_words(text: str) -> DraftgateError:
    """The error behind an in-band message, with the message as it is: for clients that speak
    Triton's protocol themselves."""
    if any(fragment in text for fragment in _CALLERS_FAULTS):
        return DraftgateError(ErrorCode.INVALID_ARGUMENT, text)
    known = _known(text)
    return DraftgateError(known.code if known else ErrorCode.INTERNAL, text)


def as_told(error: RpcStatus) -> DraftgateError:
    """The error behind a call that ended with a status other than OK, with Triton's own code and
    words where it was Triton that spoke."""
    code, text = error.code().name, error.details() or ""
    unreachable = code == ErrorCode.UNAVAILABLE and _known(text) is None
    if unreachable or code == ErrorCode.CANCELLED:
        return from_rpc_error(error)
    return DraftgateError(ErrorCode.__members__.get(code, ErrorCode.INTERNAL), text)


def means_lost(error: DraftgateError) -> bool:
    """Whether a failure in Triton's words says that the server, or the model, is not there to
    answer: another one may be."""
    return (_known(error.message) or error).code is ErrorCode.UNAVAILABLE


def _known(text: str) -> DraftgateError | None:
    own = from_wire(text)
    if own is not None:
        return own
    for fragment, code, message in _TEXTS:
        if fragment in text:
            return DraftgateError(code, message)
    return None


def _unknown(code: ErrorCode, message: str, text: str) -> DraftgateError:
    # The raw text names paths and code of the server: it belongs in the log, not at the client.
    told = f"{message}: {' '.join(text.split())[:300]}"
    # A server that is away answers every look at it, and every call, in the same words.
    if _novelty.of(told):
        _log.warning("%s", told)
    return DraftgateError(code, message)
