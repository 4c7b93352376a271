"""Requests of clients that speak Triton's protocol themselves, passed on as they are.

What comes back stays bytes. Only the id is put right: every streaming request runs under an id of
its own upstream, so that it can be stopped, and its responses carry the client's.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.failures import in_tritons_words, means_lost
from draftgate.upstream.replica import Replica

__all__ = [
    "RawCall",
    "RawStream",
    "Size",
    "Told",
    "UnansweredError",
    "failure_response",
    "final_response",
    "told_by",
]

_log = logging.getLogger(__name__)

# Tags of length-delimited fields: number << 3 | 2.
_INFER_RESPONSE = 2 << 3 | 2
_ID = 3 << 3 | 2


class UnansweredError(DraftgateError):
    """The replica was lost and had answered nothing: the request may be sent to another one, for it
    is not pinned to this one."""


@dataclass(frozen=True)
class Size:
    """What a request makes its replica do, as far as one can see."""

    prompt_tokens: int
    max_tokens: int
    pinned: bool = False
    """Whether no other replica would do: this one has what the request is about."""


@dataclass(frozen=True)
class Told:
    """What a response says about the request."""

    error: str
    """Empty if it did not fail."""
    tokens: int
    """How many it brought: those of its `output_ids`, else one if it brought anything."""


class _Raw:
    """A request on one replica, part of its load while it runs; a `Work`."""

    def __init__(self, replica: Replica, request: pb.ModelInferRequest, size: Size) -> None:
        self.replica = replica
        self.began = False
        """Whether anything came."""
        self._request = request
        self._prompt_tokens = size.prompt_tokens
        self._tokens = size.max_tokens
        self._pinned = size.pinned
        self._sent_away: DraftgateError | None = None
        # Another model, or version, may fail without the replica being any worse for generations.
        self._vital = (
            request.model_name in replica.client.profile.models and not request.model_version
        )

    @property
    def outstanding_tokens(self) -> int:
        return self._prompt_tokens + max(0, self._tokens)

    @property
    def movable(self) -> bool:
        return not (self.began or self._pinned)

    def _count(self, tokens: int) -> None:
        if tokens and self._vital:
            self.replica.moved()
        self.began = True
        self._prompt_tokens = 0
        self._tokens -= tokens

    def _note(self, error: DraftgateError) -> None:
        """Its replica hears if it was lost."""
        if self._vital and self._sent_away is None and means_lost(error):
            self.replica.lost()

    def _raised(self, error: DraftgateError) -> DraftgateError:
        """What to raise for a failure."""
        self._note(error)
        if means_lost(error) and self.movable:
            return UnansweredError(error.code, error.message)
        return error


class RawStream(_Raw):
    """One streaming request and everything that comes back for it.

    The RPC is read at Triton's speed to its end, also when nobody wants it any more: then the
    model is told to stop, or the RPC is cancelled where the models know no other way.
    """

    def __init__(
        self,
        replica: Replica,
        request: pb.ModelInferRequest,
        size: Size,
        *,
        caller_id: str,
        wire_id: str | None = None,
    ) -> None:
        """`request` is the client's, by its `caller_id`, and is changed. wire_id: that of a running
        request which this one is about; None gives it one of its own."""
        super().__init__(replica, request, size)
        self.wire_id = wire_id or f"{caller_id}-{secrets.token_hex(4)}".removeprefix("-")
        request.id = self.wire_id
        self._client = replica.client
        self._suffix = _id_suffix(caller_id.encode())
        profile = self._client.profile
        self._stop_request = (
            profile.stop(self.wire_id) if request.model_name in profile.stoppable else None
        )
        self._leave = asyncio.timeout(None)
        self._reading: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        """Nothing is delivered any more."""
        self._failure: DraftgateError | None = None

    @property
    def awaited(self) -> bool:
        # Foreign models that do not stream answer at their end, and may take their time.
        streams = self.began or self._client.profile.description is None
        return streams and not self._over.is_set()

    def send_away(self, error: DraftgateError) -> None:
        self._sent_away = error
        self._abandon(error)

    async def run(
        self, metadata: Sequence[tuple[str, str]], deliver: Callable[[bytes, Told], None]
    ) -> None:
        """Send it; `deliver` gets every response, with the client's id. Leaving early stops it.

        Raises DraftgateError with Triton's code and words: UnansweredError if the server was lost
        and had answered nothing, be it that it said so in its first response. Later responses that
        tell of a failure are delivered like any other.
        """
        with self.replica.carrying(self):
            self._reading = self._client.spawn(self._read(metadata, deliver))
            try:
                await self._over.wait()
            finally:
                self._abandon(DraftgateError(ErrorCode.CANCELLED, "the request was left"))
        if self._failure is not None:
            raise self._raised(self._failure)

    def _abandon(self, error: DraftgateError) -> None:
        """End it now. Without effect once it is over."""
        if self._over.is_set() or self._reading is None:
            return
        self._end(error)
        if self._stop_request is None:
            self._reading.cancel()
        else:
            self._client.spawn(self._stop(self._stop_request))

    def _end(self, failure: DraftgateError | None = None) -> None:
        if not self._over.is_set():
            self._failure = failure
            self._over.set()

    async def _read(
        self, metadata: Sequence[tuple[str, str]], deliver: Callable[[bytes, Told], None]
    ) -> None:
        try:
            async with self._leave:
                content = self._request.SerializeToString()
                await self._client.stream_raw(
                    content, metadata, lambda response: self._take(response, deliver)
                )
        except TimeoutError:
            _log.warning("request %s: Triton did not end its stream", self.wire_id)
        except DraftgateError as error:
            self._end(error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            _log.exception("request %s: passing it on failed", self.wire_id)
            self._end(DraftgateError(ErrorCode.INTERNAL, "internal error"))
        finally:
            self._end()

    def _take(self, response: bytes, deliver: Callable[[bytes, Told], None]) -> None:
        self._client.chunks_received += 1
        if self._over.is_set():
            return
        told = told_by(response)
        if told.error:
            error = in_tritons_words(told.error)
            if not self.began and means_lost(error):
                self._end(error)
                return
            self._note(error)
        self._count(told.tokens)
        # Of a message that comes twice protobuf merges the fields, the last wins.
        deliver(response + self._suffix, told)

    async def _stop(self, request: pb.ModelInferRequest) -> None:
        try:
            await self._client.stop(request)
        except DraftgateError as error:
            _log.warning("request %s could not be stopped: %s", self.wire_id, error.message)
        if self._reading is not None and not self._reading.done():
            now = asyncio.get_running_loop().time()
            self._leave.reschedule(now + self._client.config.drain_timeout_s)


class RawCall(_Raw):
    """One request with one response."""

    def __init__(self, replica: Replica, request: pb.ModelInferRequest, size: Size) -> None:
        super().__init__(replica, request, size)
        self._leave = asyncio.timeout(None)

    @property
    def awaited(self) -> bool:
        return False  # It answers at its end, and may take its time.

    def send_away(self, error: DraftgateError) -> None:
        self._sent_away = error
        self._leave.reschedule(asyncio.get_running_loop().time())

    async def run(
        self, metadata: Sequence[tuple[str, str]], timeout_s: float | None
    ) -> tuple[bytes, int]:
        """What Triton answers, and how many tokens that is.

        Raises DraftgateError with Triton's code and words, UnansweredError if the server was lost.
        """
        content = self._request.SerializeToString()
        try:
            with self.replica.carrying(self):
                async with self._leave:
                    answer = await self.replica.client.call_raw(
                        "ModelInfer", content, timeout_s=timeout_s, metadata=metadata
                    )
        except TimeoutError as error:
            assert self._sent_away is not None
            raise self._raised(self._sent_away) from error
        except DraftgateError as error:
            raise self._raised(error) from error
        tokens = _answer_tokens(answer)
        self._count(tokens)
        return answer, tokens


def failure_response(request_id: str, message: str) -> bytes:
    """A response that says in band what is wrong with a request."""
    response = pb.ModelStreamInferResponse(error_message=message)
    response.infer_response.id = request_id
    return response.SerializeToString()


def final_response(request_id: str, model: str) -> bytes:
    """A last response, with no outputs."""
    response = pb.ModelStreamInferResponse()
    response.infer_response.id = request_id
    response.infer_response.model_name = model
    response.infer_response.parameters["triton_final_response"].bool_param = True
    return response.SerializeToString()


def told_by(response: bytes) -> Told:
    """What a streamed response says; nothing if it cannot be read."""
    try:
        parsed = pb.ModelStreamInferResponse.FromString(response)
    except DecodeError:
        return Told("", 0)
    return Told(parsed.error_message, _tokens_of(parsed.infer_response))


def _answer_tokens(answer: bytes) -> int:
    try:
        return _tokens_of(pb.ModelInferResponse.FromString(answer))
    except DecodeError:
        return 0


def _tokens_of(response: pb.ModelInferResponse) -> int:
    for output in response.outputs:
        if output.name == "output_ids":
            return max(0, math.prod(output.shape))
    return 1 if response.outputs else 0


def _id_suffix(request_id: bytes) -> bytes:
    """A serialised response with nothing but the id, also an empty one."""
    field = bytes((_ID,)) + _as_varint(len(request_id)) + request_id
    return bytes((_INFER_RESPONSE,)) + _as_varint(len(field)) + field


def _as_varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
