"""What surrounds every call to our services: decoding, its server span, its status.

Servicers stay thin: they raise DraftgateError, or are cancelled, and this file makes that the
status of the call and of its span.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import status
from draftgate.gateway.tenant import current_tenant
from draftgate.telemetry.codes import OK
from draftgate.telemetry.logs import log_call
from draftgate.telemetry.spans import ServerSpan
from draftgate.telemetry.tracing import Tracing

__all__ = ["CallBoundary", "Decoded", "decoding", "surround"]

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler = Callable[[Any, _Context], Awaitable[Any]]
Decoded = Message | DraftgateError | AsyncIterator[Message | DraftgateError]
"""Of a stream each message is decoded for itself; those that cannot be are for the servicer."""


class CallBoundary(grpc.aio.ServerInterceptor):
    """Surrounds the methods under `prefix`."""

    def __init__(self, tracing: Tracing, *, prefix: str) -> None:
        self._tracing = tracing
        self._prefix = prefix
        self.stopping = False
        """Set before the server cuts calls, so that they count as UNAVAILABLE, not CANCELLED."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or not method.startswith(self._prefix):
            return handler
        return surround(handler, lambda inner: self._surrounded(method.removeprefix("/"), inner))

    def _surrounded(self, method: str, inner: _Handler) -> _Handler:
        async def handle(request: Decoded, context: _Context) -> Any:
            call = _Call(self._tracing, method, context)
            try:
                if isinstance(request, DraftgateError):
                    raise request
                with call.span.active():
                    answer = await inner(request, context)
            except DraftgateError as error:
                await call.fail(error)
            except asyncio.CancelledError:
                call.end(self._cancel_code(context))
                raise
            except grpc.aio.BaseError as gone:
                call.end(self._cancel_code(context))
                raise asyncio.CancelledError("the caller has gone") from gone
            except Exception:  # noqa: BLE001  # a bug: logged here, and hidden from the caller
                _log.exception("%s failed", method)
                await call.fail(DraftgateError(ErrorCode.INTERNAL, "internal error"))
            call.end(OK)
            return answer

        return handle

    def _cancel_code(self, context: _Context) -> str:
        # A passed deadline, a caller who left and a server that stops all cancel the handler.
        if context.time_remaining() == 0:
            return ErrorCode.DEADLINE_EXCEEDED
        return ErrorCode.UNAVAILABLE if self.stopping else ErrorCode.CANCELLED


class _Call:
    """One call, from its start to its span's and its log record's."""

    def __init__(self, tracing: Tracing, method: str, context: _Context) -> None:
        self.span = ServerSpan(tracing.tracer, method, context.invocation_metadata() or ())
        self._method = method
        self._context = context
        self._began_s = time.monotonic()

    def end(self, code: str, refusal: str = "") -> None:
        """refusal: the limit that turned it away, if one did."""
        self.span.end(code, refusal)
        with self.span.active():
            log_call(
                self._method, code, self._began_s, tenant=current_tenant().name, refusal=refusal
            )

    async def fail(self, error: DraftgateError) -> NoReturn:
        """End it with the error as its status."""
        self.end(error.code, error.refusal.reason if error.refusal else "")
        await status.abort(self._context, error)


def surround(
    handler: Any, around: Callable[[_Handler], _Handler], *, strict: bool = True
) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler with `around` its method, which gets what cannot be decoded as a value. strict:
    as of `decoding`."""
    make, inner = _method_of(handler)
    made: grpc.RpcMethodHandler[Any, Any] = make(
        around(inner),
        request_deserializer=decoding(handler.request_deserializer, strict=strict),
        response_serializer=handler.response_serializer,
    )
    return made


def _method_of(handler: Any) -> tuple[Callable[..., Any], _Handler]:
    """How a handler of this kind is made, and the method in it. We have none of the fourth kind."""
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def decoding(
    decode: Callable[[bytes], Message], *, strict: bool = True
) -> Callable[[bytes], Message | DraftgateError]:
    """`decode` that hands its failure on as a value: raised here it would be the status UNKNOWN.

    strict: a field of another wire type is a failure too.
    """

    def checked(content: bytes) -> Message | DraftgateError:
        try:
            message = decode(content)
        except DecodeError:
            return DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                "request: got bytes that are no such message, or text that is not UTF-8",
                field="request",
            )
        mistyped = _mistyped_field(message) if strict else ""
        if mistyped:
            return DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{mistyped}: got another wire type, allowed: the type in the .proto file",
                field=mistyped,
            )
        return message

    return checked


def _mistyped_field(message: Message, prefix: str = "") -> str:
    """The first field that came with the wrong wire type, which protobuf takes for unknown.

    Left alone it would be dropped in silence. Numbers that are really unknown stay allowed.
    """
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        field = message.DESCRIPTOR.fields_by_number.get(unknown[index].field_number)
        if field is not None:
            return prefix + field.name
    for field, value in message.ListFields():
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        children = value if field.is_repeated else [value]
        for index, child in enumerate(children):
            name = f"{field.name}[{index}]" if field.is_repeated else field.name
            found = _mistyped_field(child, f"{prefix}{name}.")
            if found:
                return found
    return ""
