"""Async client of one Triton server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer
from draftgate.upstream import failures, requests, responses
from draftgate.upstream.buffer import BufferLimits
from draftgate.upstream.coalescing import Coalescing
from draftgate.upstream.generation import Generation
from draftgate.upstream.http2 import KeepAlive
from draftgate.upstream.profiles import DraftgateProfile, ModelView, Profile, detect
from draftgate.upstream.streams import Call, CallError, StreamChannel
from draftgate.upstream.types import EngineCounters, EngineDescription, GenerationRequest

__all__ = ["TritonClient", "TritonClientConfig"]

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
