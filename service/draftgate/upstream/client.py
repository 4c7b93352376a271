"""Async client of one Triton server: one streaming RPC per generation, and the way to end it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from draftgate.upstream import failures, requests, responses
from draftgate.upstream.buffer import BufferLimits, ChunkBuffer
from draftgate.upstream.coalescing import Coalescing
from draftgate.upstream.http2 import KeepAlive
from draftgate.upstream.profiles import DraftgateProfile, ModelView, Profile, detect
from draftgate.upstream.streams import Call, CallError, StreamChannel
from draftgate.upstream.types import Chunk, EngineCounters, EngineDescription, GenerationRequest

__all__ = ["Generation", "TritonClient", "TritonClientConfig"]

_log = logging.getLogger(__name__)

# What a request is turned down with. Any other failure, or one behind a chunk, may have left the
# engine with a running row: the ensemble does not end the engine's step when a later one fails.
_REFUSALS = frozenset(
    {
        ErrorCode.INVALID_ARGUMENT,
        ErrorCode.NOT_FOUND,
        ErrorCode.ALREADY_EXISTS,
        ErrorCode.FAILED_PRECONDITION,
        ErrorCode.RESOURCE_EXHAUSTED,
        ErrorCode.UNIMPLEMENTED,
    }
)

_SERVICE = "/inference.GRPCInferenceService"
_STREAM_INFER = f"{_SERVICE}/ModelStreamInfer"

# Triton answers pings more frequent than one in 300 s with GOAWAY, which ends every stream.
_KEEP_ALIVE = KeepAlive(after_s=330.0, timeout_s=20.0)
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", int(_KEEP_ALIVE.after_s * 1000)),
    ("grpc.keepalive_timeout_ms", int(_KEEP_ALIVE.timeout_s * 1000)),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    # A lost generation is resumed by us, not tried again by gRPC.
    ("grpc.enable_retries", 0),
)


@dataclass(frozen=True)
class TritonClientConfig:
    """How to speak to one Triton server."""

    target: str
    """Its gRPC address, host:port."""
    entry_model: str | None = None
    """The model that generations are sent to; None takes the usual one of those that are there."""
    limits: BufferLimits = field(default_factory=BufferLimits)
    """How far the consumer of a generation may lag behind."""
    control_timeout_s: float = 10.0
    """For a request to the engine's control plane."""
    stop_timeout_s: float = 2.0
    """For the engine to acknowledge a stop."""
    drain_timeout_s: float = 5.0
    """For the RPC of a generation to end after its last chunk or its stop; then it is cancelled."""


class TritonClient:
    """Needs a running event loop; `close` it from the same one."""

    def __init__(
        self,
        config: TritonClientConfig,
        tokenizer: Tokenizer | None = None,
        coalescing: Coalescing | None = None,
    ) -> None:
        """tokenizer: for models that take no text, or no messages, so that callers may give it.
        coalescing: for all clients of a gateway; None hands every chunk on alone."""
        self.config = config
        self.coalescing = coalescing
        self._tokenizer = tokenizer
        self.profile: Profile = DraftgateProfile()
        """How its models are spoken to; our own way until `find_profile` has looked."""
        self.chunks_received = 0
        """Of all generations together, so that who watches sees whether anything moves."""
        self._streams = StreamChannel(config.target, _KEEP_ALIVE)
        # A connection of its own: however many generations fill up the other one, a stop and a look
        # at the server get through.
        self._channel = grpc.aio.insecure_channel(config.target, options=_CHANNEL_OPTIONS)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Let stops and drains end within their time limits, then leave."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._streams.close()
        await self._channel.close()

    def generate(self, request: GenerationRequest) -> Generation:
        """A generation, not started yet: `async with client.generate(...).started() as chunks`."""
        return Generation(self, request, self.profile)

    async def find_profile(self, timeout_s: float) -> Profile:
        """Look which models there are and how they are spoken to.

        Raises DraftgateError: FAILED_PRECONDITION if there are none of a known kind, else what
        kept it from looking.
        """
        self.profile = await detect(
            lambda model: self._view(model, timeout_s),
            self.config.entry_model,
            self._tokenizer,
            names=lambda: self._models(timeout_s),
        )
        return self.profile

    async def stop(self, request: pb.ModelInferRequest) -> None:
        """Send a profile's stop request.

        Raises DraftgateError if the engine did not acknowledge it in time.
        """
        await self._ask(request, self.config.stop_timeout_s)

    async def describe(self) -> EngineDescription:
        """What the engine serves. Raises DraftgateError."""
        known = self.profile.description
        if known is not None:
            return known
        return EngineDescription.from_json(await self._control("describe"))

    async def counters(self) -> EngineCounters:
        """The engine's counters. Raises DraftgateError."""
        return EngineCounters.from_json(await self._control("counters"))

    async def gate_state(self) -> str:
        """What the engine's gate does and knows, in JSON. Raises DraftgateError."""
        return await self._control("gate")

    async def set_gate_policy(self, policy: Mapping[str, object], *, save: bool) -> str:
        """Have the gate obey a policy; its state then, in JSON. save: at the next start too.

        Raises DraftgateError: INVALID_ARGUMENT naming what is out of range.
        """
        return await self._control("set_gate_policy", policy=dict(policy), save=save)

    async def gate_steps(self, after: int | None) -> str:
        """What became of the engine's steps after this number, as many as it tells at once, in
        JSON. None: of none, but the number of the latest. Raises DraftgateError."""
        return await self._control("gate_steps", **({} if after is None else {"after": after}))

    async def server_ready(self, timeout_s: float) -> bool:
        """Whether the server says that it is ready. Raises DraftgateError if it cannot say."""
        try:
            answer = await self._stub.ServerReady(pb.ServerReadyRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failures.from_rpc_error(error) from error
        return answer.ready

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        """Whether the server says that `model` is ready. Raises DraftgateError if it cannot say."""
        request = pb.ModelReadyRequest(name=model)
        try:
            answer = await self._stub.ModelReady(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failures.from_rpc_error(error) from error
        return answer.ready

    async def _models(self, timeout_s: float) -> Sequence[str]:
        """The names of the models that are loaded. Raises DraftgateError."""
        try:
            answer = await self._stub.ModelStatistics(
                pb.ModelStatisticsRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise failures.from_rpc_error(error) from error
        return list(dict.fromkeys(each.name for each in answer.model_stats))

    async def _view(self, model: str, timeout_s: float) -> ModelView | None:
        """What Triton says of a model; None if it has no such model."""
        request = pb.ModelConfigRequest(name=model)
        try:
            answer = await self._stub.ModelConfig(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            failure = failures.from_rpc_error(error)
            if failure.code is ErrorCode.NOT_FOUND:
                return None
            raise failure from error
        return ModelView.of(answer.config)

    async def open_infer(
        self,
        request: pb.ModelInferRequest,
        metadata: Sequence[tuple[str, str]],
        take: Callable[[pb.ModelStreamInferResponse], None],
    ) -> Call:
        """Send one request; `take` gets what Triton streams back. The end is for `infer_ended`.

        Failures may stand in the responses. Raises DraftgateError if it cannot be sent.
        """

        def read(response: bytes) -> None:
            take(pb.ModelStreamInferResponse.FromString(response))

        try:
            return await self._streams.open(
                _STREAM_INFER, request.SerializeToString(), metadata, read
            )
        except CallError as error:
            raise failures.from_rpc_error(error) from error

    async def infer_ended(self, call: Call) -> None:
        """Wait for the end of such an RPC. Raises DraftgateError for what it failed with, and what
        `take` raised."""
        try:
            await call.wait()
        except CallError as error:
            raise failures.from_rpc_error(error) from error

    async def call_raw(
        self,
        method: str,
        request: bytes,
        *,
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> bytes:
        """What Triton answers to a call with one request and one response, unread.

        Raises DraftgateError with Triton's code and words.
        """
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(
            f"{_SERVICE}/{method}"
        )
        try:
            return bytes(await call(request, timeout=timeout_s, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise failures.as_told(error) from error

    async def stream_raw(
        self,
        request: bytes,
        metadata: Sequence[tuple[str, str]],
        take: Callable[[bytes], None],
    ) -> None:
        """Run one request to the end of its RPC; `take` gets what Triton streams back, unread.

        Raises DraftgateError with Triton's code and words, and what `take` raises.
        """
        try:
            await self._streams.call(_STREAM_INFER, request, metadata, take)
        except CallError as error:
            raise failures.as_told(error) from error

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` to its end, which `close` waits for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _control(self, op: str, **arguments: object) -> str:
        if self.profile.description is not None:
            raise DraftgateError(
                ErrorCode.UNIMPLEMENTED,
                f"the models behind this gateway ({self.profile.name}) have no gate and no other"
                " control plane",
            )
        request = requests.control_request(f"control-{secrets.token_hex(8)}", op, arguments)
        answers = await self._ask(request, self.config.control_timeout_s)
        for answer in answers:
            if responses.has_outputs(answer):
                return responses.control_result(answer)
        raise DraftgateError(ErrorCode.INTERNAL, f"the engine did not answer {op!r}")

    async def _ask(
        self, request: pb.ModelInferRequest, timeout_s: float
    ) -> list[pb.ModelInferResponse]:
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._streamed(request)
        except TimeoutError as error:
            raise DraftgateError(
                ErrorCode.UNAVAILABLE, f"the engine did not answer within {timeout_s:g} s"
            ) from error
        for answer in answers:
            if answer.error_message:
                raise failures.from_text(answer.error_message)
        return [answer.infer_response for answer in answers]

    async def _streamed(self, request: pb.ModelInferRequest) -> list[pb.ModelStreamInferResponse]:
        call = self._stub.ModelStreamInfer()
        try:
            await call.write(request)
            await call.done_writing()
            return [answer async for answer in call]
        except grpc.aio.AioRpcError as error:
            raise failures.from_rpc_error(error) from error
        finally:
            call.cancel()  # Without effect once the RPC is over.


class Generation:
    """One generation: `started` is an async context manager, inside it is an iterator of chunks.

    Leaving before the last chunk, for whatever reason, frees the engine's row: an ensemble does
    not hand a cancelled RPC on to its running step, so the engine is told with a `stop` request.
    Only a request that was refused has no row. The RPC itself is read to its end, because Triton
    may crash on an early cancel; it is cancelled where the models know no other way.
    """

    def __init__(self, client: TritonClient, request: GenerationRequest, profile: Profile) -> None:
        self._client = client
        # A caller may use its id again at once, and a late stop must not end the new generation.
        self.wire_id = f"{request.request_id}-{secrets.token_hex(4)}"
        self._profile = profile
        self._request = request
        self._reader = profile.reader(request)
        self._buffer = ChunkBuffer(
            client.config.limits, client.coalescing, wait=not request.at_once
        )
        self._opening: asyncio.Timeout | None = None
        self._call: Call | None = None
        self._leave: asyncio.TimerHandle | None = None
        self._began = False
        self._refused = False
        self._stopping = False

    @asynccontextmanager
    async def started(self, metadata: Sequence[tuple[str, str]] = ()) -> AsyncIterator[Generation]:
        """Run it. `metadata` goes with the RPC: the trace context of a sampled request."""
        await self._open(metadata)
        try:
            yield self
        finally:
            self.abandon(DraftgateError(ErrorCode.CANCELLED, "the generation was abandoned"))

    @property
    def began(self) -> bool:
        """Whether any chunk came."""
        return self._began

    @property
    def ended(self) -> bool:
        """Whether nothing more will come from Triton; chunks may still wait to be taken."""
        return self._buffer.ended

    @property
    def refused(self) -> bool:
        """Whether it was turned down before it began."""
        return self._refused

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Chunk:
        """Raises DraftgateError for whatever ended the generation early, or kept it from starting:
        UNIMPLEMENTED or INVALID_ARGUMENT naming what is asked for that the models cannot do."""
        chunk = await self._buffer.get()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def abandon(self, error: DraftgateError) -> None:
        """End the generation now: the consumer sees `error` next, the engine is told to stop.

        Without effect once the last chunk came.
        """
        self._fail(error, at_once=True)

    def _fail(self, error: DraftgateError, *, at_once: bool = False) -> None:
        self._buffer.fail(error, at_once=at_once)
        if self._buffer.finished or self._refused or self._stopping:
            return
        self._stopping = True
        if self._call is not None:
            self._client.spawn(self._stop(self._call))
        elif self._opening is not None:
            self._opening.reschedule(asyncio.get_running_loop().time())

    def _fail_upstream(self, error: DraftgateError) -> None:
        """Fail with what Triton said, in a response or as the status of the RPC."""
        self._refused = error.code in _REFUSALS and not self._began
        self._fail(error)

    async def _open(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Send the request, in the consumer's own task: a new one would wait for its turn."""
        try:
            call = self._call = await self._sent(metadata)
        except DraftgateError as error:
            self._fail_upstream(error)
            return
        if call is None:
            return
        self._client.spawn(self._read(call))
        if self._stopping:
            self._client.spawn(self._stop(call))

    async def _sent(self, metadata: Sequence[tuple[str, str]]) -> Call | None:
        """None if it was abandoned before."""
        try:
            async with asyncio.timeout(None) as self._opening:
                request = await self._profile.generation(self._request, self.wire_id)
                return await self._client.open_infer(request, metadata, self._take)
        except TimeoutError:
            if not self._stopping:
                raise
            return None
        finally:
            self._opening = None

    async def _read(self, call: Call) -> None:
        """Read the RPC to its end; once nobody wants the chunks any more, for a bounded time."""
        try:
            await self._client.infer_ended(call)
        except DraftgateError as error:
            self._fail_upstream(error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a consumer that is not told would wait for ever.
            _log.exception("generation %s: reading it failed", self.wire_id)
            self._fail(DraftgateError(ErrorCode.INTERNAL, "the gateway failed to read a response"))
        else:
            self._take_end()
        finally:
            if self._leave is not None:
                self._leave.cancel()

    def _take(self, response: pb.ModelStreamInferResponse) -> None:
        if self._buffer.ended:
            return
        if response.error_message:
            self._fail_upstream(failures.from_text(response.error_message))
        else:
            content = response.infer_response
            if responses.has_outputs(content):
                self._began = True
                self._client.chunks_received += 1
            try:
                self._put(self._reader.read(content))
            except DraftgateError as error:
                self._fail(error)
        if self._buffer.finished or self._refused:
            self._limit_reading()

    def _take_end(self) -> None:
        if self._buffer.ended:
            return
        try:
            self._put(self._reader.end())
        except DraftgateError as error:
            self._fail(error)

    def _put(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._buffer.put(chunk)

    async def _stop(self, call: Call) -> None:
        request = self._profile.stop(self.wire_id)
        if request is None:
            call.cancel()
            return
        try:
            await self._client.stop(request)
        except DraftgateError as error:
            _log.warning("generation %s could not be stopped: %s", self.wire_id, error.message)
        self._limit_reading()

    def _limit_reading(self) -> None:
        call = self._call
        if call is None or call.over or self._leave is not None:
            return
        loop = asyncio.get_running_loop()
        self._leave = loop.call_later(self._client.config.drain_timeout_s, self._give_up, call)

    def _give_up(self, call: Call) -> None:
        _log.warning("generation %s: Triton did not end its stream", self.wire_id)
        call.cancel()
