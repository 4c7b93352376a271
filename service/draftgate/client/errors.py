"""What a failed call says: the server's status with its details, as one typed error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from draftgate._pb.draftgate.v1.session_pb2 import SessionStatus
from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["CallError", "FieldViolation", "QuotaViolation", "cancelled_here", "closed_here"]

_STATUS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that is at fault."""

    field: str
    """Dotted from the root of the protobuf request."""
    description: str


@dataclass(frozen=True)
class QuotaViolation:
    """A limit that turned the request away."""

    subject: str
    """Whose limit it is, such as `server` or `tenant:acme`."""
    description: str


class CallError(DraftgateError):
    """A call failed. `code` and `message` are the server's, or gRPC's where no server answered."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        quota_violations: tuple[QuotaViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(code, message, field=field_violations[0].field if field_violations else "")
        self.reason = reason
        """Which limit or fault it was, in upper snake case; empty if the server did not say."""
        self.field_violations = field_violations
        self.quota_violations = quota_violations
        self.retry_after_s = retry_after_s
        """When the server wants to be asked again; None: it does not say."""

    @classmethod
    def from_call(cls, error: Any) -> CallError:
        """From what grpc or grpc.aio raised."""
        code: grpc.StatusCode = error.code()
        details: Iterable[any_pb2.Any] = ()
        for key, value in error.trailing_metadata() or ():
            if key == _STATUS_KEY:
                details = _details(value)
        return cls._made(code.name, error.details() or "", details)

    @classmethod
    def from_session(cls, status: SessionStatus) -> CallError:
        """From the end of one generation of a session."""
        known = status.code in code_pb2.Code.values()
        name = code_pb2.Code.Name(status.code) if known else "UNKNOWN"
        return cls._made(name, status.message, status.details)

    @classmethod
    def _made(cls, code: str, message: str, details: Iterable[any_pb2.Any]) -> CallError:
        reason = ""
        fields: list[FieldViolation] = []
        quotas: list[QuotaViolation] = []
        retry_after_s: float | None = None
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        quota = error_details_pb2.QuotaFailure()
        retry = error_details_pb2.RetryInfo()
        for detail in details:
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad):
                fields += [FieldViolation(v.field, v.description) for v in bad.field_violations]
            elif detail.Unpack(quota):
                quotas += [QuotaViolation(v.subject, v.description) for v in quota.violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
        return cls(
            # Codes that Draftgate never uses are somebody else's faults in between.
            ErrorCode.__members__.get(code, ErrorCode.INTERNAL),
            message or f"the server answered {code}",
            reason=reason,
            field_violations=tuple(fields),
            quota_violations=tuple(quotas),
            retry_after_s=retry_after_s,
        )


def cancelled_here() -> CallError:
    """What a call ends with that its caller cancelled."""
    return CallError(ErrorCode.CANCELLED, "the call was cancelled by its caller")


def closed_here() -> CallError:
    """What a call ends with that is made on a client that has been closed."""
    return CallError(ErrorCode.FAILED_PRECONDITION, "the client has been closed")


def _details(content: bytes) -> tuple[any_pb2.Any, ...]:
    try:
        return tuple(status_pb2.Status.FromString(content).details)
    except DecodeError:
        return ()  # Not Draftgate's: code and message stand for themselves.
