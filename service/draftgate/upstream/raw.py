"""Requests of clients that speak Triton's protocol themselves: passed on, and never looked into.

What comes back stays bytes. Only the id is put right: every request runs under an id of its own
upstream, so that it can be stopped, and its responses carry the client's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.client import TritonClient

__all__ = ["RawStream", "error_message", "failure_response"]

_log = logging.getLogger(__name__)

# Tags of length-delimited fields: number << 3 | 2.
_ERROR_MESSAGE = 1 << 3 | 2
_INFER_RESPONSE = 2 << 3 | 2
_ID = 3 << 3 | 2


class RawStream:
    """One streaming request and everything that comes back for it.

    The RPC is read at Triton's speed to its end, also when nobody wants it any more: then the
    model is told to stop, or the RPC is cancelled where the models know no other way.
    """

    def __init__(
        self, client: TritonClient, request: pb.ModelInferRequest, *, wire_id: str | None = None
    ) -> None:
        """`request` is the client's, and is changed. wire_id: that of a running request which this
        one is about; None gives it one of its own."""
        self.client = client
        self.caller_id = request.id
        self.wire_id = wire_id or f"{request.id}-{secrets.token_hex(4)}".removeprefix("-")
        self.failure: DraftgateError | None = None
        """Why the RPC failed, once it is over."""
        self.abandoned = False
        request.id = self.wire_id
        self._request = request
        self._suffix = _id_suffix(self.caller_id.encode())
        profile = client.profile
        self._stop_request = (
            profile.stop(self.wire_id) if request.model_name in profile.stoppable else None
        )
        self._leave = asyncio.timeout(None)
        self._reading: asyncio.Task[None] | None = None
        self._deliver: Callable[[bytes], None] | None = None

    def start(
        self, metadata: Sequence[tuple[str, str]], deliver: Callable[[bytes], None]
    ) -> asyncio.Task[None]:
        """Send it. `deliver` gets every response, with the client's id; the task ends with the
        RPC, and raises nothing."""
        self._deliver = deliver
        self._reading = self.client.spawn(self._read(metadata))
        return self._reading

    def abandon(self) -> None:
        """End it now; nothing is delivered any more. Without effect once it is over."""
        if self._reading is None or self._reading.done() or self._deliver is None:
            return
        self._deliver = None
        self.abandoned = True
        if self._stop_request is None:
            self._reading.cancel()
        else:
            self.client.spawn(self._stop(self._stop_request))

    async def _read(self, metadata: Sequence[tuple[str, str]]) -> None:
        try:
            async with self._leave:
                content = self._request.SerializeToString()
                async for response in self.client.stream_raw(content, metadata):
                    if self._deliver is not None:
                        # Of a message that comes twice protobuf merges the fields, the last wins.
                        self._deliver(response + self._suffix)
        except TimeoutError:
            _log.warning("request %s: Triton did not end its stream", self.wire_id)
        except DraftgateError as error:
            self.failure = error
        except Exception:  # noqa: BLE001 - logged with its traceback
            _log.exception("request %s: passing it on failed", self.wire_id)
            self.failure = DraftgateError(ErrorCode.INTERNAL, "internal error")

    async def _stop(self, request: pb.ModelInferRequest) -> None:
        try:
            await self.client.stop(request)
        except DraftgateError as error:
            _log.warning("request %s could not be stopped: %s", self.wire_id, error.message)
        if self._reading is not None and not self._reading.done():
            now = asyncio.get_running_loop().time()
            self._leave.reschedule(now + self.client.config.drain_timeout_s)


def failure_response(request_id: str, message: str) -> bytes:
    """A response that says in band what is wrong with a request."""
    response = pb.ModelStreamInferResponse(error_message=message)
    response.infer_response.id = request_id
    return response.SerializeToString()


def error_message(response: bytes) -> str:
    """The error that a streamed response carries; empty if none."""
    position = 0
    while position < len(response):
        tag, position = _varint(response, position)
        length, position = _varint(response, position)
        if tag == _ERROR_MESSAGE:
            return response[position : position + length].decode(errors="replace")
        position += length
    return ""


def _id_suffix(request_id: bytes) -> bytes:
    """A serialised response with nothing but the id, also an empty one."""
    field = bytes((_ID,)) + _as_varint(len(request_id)) + request_id
    return bytes((_INFER_RESPONSE,)) + _as_varint(len(field)) + field


def _varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(content):
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
