"""DraftgateError -> gRPC status, in one place."""

from __future__ import annotations

import asyncio
import math
from typing import Any, NoReturn

import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["abort", "to_status"]

ERROR_DOMAIN = "draftgate"


def to_status(error: DraftgateError) -> status_pb2.Status:
    """The status with its details: an ErrorInfo always, a BadRequest if a field is at fault, a
    QuotaFailure and a RetryInfo if a limit is."""
    refusal = error.refusal
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.value), message=error.message)
    reason = refusal.reason if refusal else error.code.value
    info = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    status.details.append(_packed(info))
    if error.field and error.code is ErrorCode.INVALID_ARGUMENT:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=error.field, description=error.message)
        status.details.append(_packed(bad))
    if refusal:
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=refusal.subject, description=error.message)
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(refusal.retry_after_s * 1000))
        status.details.extend((_packed(quota), _packed(retry)))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DraftgateError) -> NoReturn:
    """End the call with the error's status."""
    # Where the caller is stuck, the status waits for as long as the connection stays. The frames
    # that the error came through, and with them the prompt and what came of it, must not.
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except grpc.aio.AbortError:
        raise  # That is how it ends.
    except grpc.aio.BaseError as gone:
        raise asyncio.CancelledError("the caller has gone") from gone


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
