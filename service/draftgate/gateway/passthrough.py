"""`inference.GRPCInferenceService` for clients that speak Triton's protocol, passed through.

Whatever infers takes a place, as a generation does, and goes to the replica with the least to do.
Every request on a client's stream runs concurrently, on an RPC of its own, which may be that of any
replica; so requests overtake each other also where one Triton would have kept their order, and the
id tells which is which. Those of one sequence keep their order, and their replica.

Failures are told as Triton does: in band, or as the status of the stream if the client sent the
metadata `triton_grpc_error: true`. That is done here and not asked of Triton, which before 26.04
may crash over it.

The server is ready if one of the replicas is. Its metadata, and that of models and whether they are
ready, are those of the first replica that is; statistics are added up over all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, shutting_down
from draftgate.gateway.activity import Activity
from draftgate.gateway.admission import Place
from draftgate.gateway.boundary import CallBoundary, decoding
from draftgate.gateway.calls import deadline_ms
from draftgate.gateway.passed_stream import PassedStream, StreamSettings
from draftgate.gateway.passing import Passing
from draftgate.gateway.statistics import summed
from draftgate.gateway.tenant import ANONYMOUS, current_tenant
from draftgate.telemetry.spans import note_tenant
from draftgate.telemetry.tracing import Tracing
from draftgate.upstream.raw import RawCall
from draftgate.upstream.replica import Replica

__all__ = ["SERVICE", "Passthrough"]

SERVICE = "inference.GRPCInferenceService"

_UNARY: dict[str, type[Message]] = {
    "ServerLive": pb.ServerLiveRequest,
    "ServerReady": pb.ServerReadyRequest,
    "ServerMetadata": pb.ServerMetadataRequest,
    "ModelReady": pb.ModelReadyRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest,
    "ModelStatistics": pb.ModelStatisticsRequest,
    "ModelInfer": pb.ModelInferRequest,
}
"""The calls that are passed on, beside ModelStreamInfer. What else Triton offers changes the server
(models, shared memory, settings) and is UNIMPLEMENTED here."""

_Context = grpc.aio.ServicerContext[Any, Any]


class Passthrough:
    """All calls of such clients to one gateway."""

    def __init__(self, passing: Passing, tracing: Tracing, settings: StreamSettings) -> None:
        self._passing = passing
        self._settings = settings
        self._boundary = _Boundary(tracing, prefix=f"/{SERVICE}/")
        self._streams: set[PassedStream] = set()
        self._activity = Activity()
        self._draining = False

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """What a server registers, by the names of the methods."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._boundary.around(f"{SERVICE}/{name}", self._answering(name)),
                request_deserializer=decoding(request.FromString, strict=False),
            )
            for name, request in _UNARY.items()
        }
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._boundary.around(f"{SERVICE}/ModelStreamInfer", self._stream),
            request_deserializer=decoding(pb.ModelInferRequest.FromString, strict=False),
        )
        return methods

    def drain(self) -> None:
        """Take no new requests; streams that run none end."""
        self._draining = True
        for stream in self._streams:
            stream.drain()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the running requests to end; False if some still run then."""
        return await self._activity.wait_idle(timeout_s)

    def cut(self) -> None:
        """End what still runs with UNAVAILABLE."""
        self._boundary.stopping = True
        for stream in self._streams:
            stream.cut()

    def _answering(self, method: str) -> Callable[[Any, _Context], Awaitable[bytes]]:
        async def handle(request: Message, context: _Context) -> bytes:
            if isinstance(request, pb.ServerLiveRequest):
                return pb.ServerLiveResponse(live=True).SerializeToString()
            if isinstance(request, pb.ServerReadyRequest):
                ready = self._passing.serving and not self._draining
                return pb.ServerReadyResponse(ready=ready).SerializeToString()
            with self._one():
                if isinstance(request, pb.ModelInferRequest):
                    return await self._infer(request, context)
                content = request.SerializeToString()
                if isinstance(request, pb.ModelStatisticsRequest):
                    return await self._statistics(content, context)
                return await self._passing.ask(method, content, context.time_remaining)

        return handle

    async def _statistics(self, request: bytes, context: _Context) -> bytes:
        answers = await self._passing.ask_all("ModelStatistics", request, context.time_remaining())
        if len(answers) == 1:
            return answers[0]
        parsed = [pb.ModelStatisticsResponse.FromString(each) for each in answers]
        return summed(parsed).SerializeToString()

    async def _infer(self, request: pb.ModelInferRequest, context: _Context) -> bytes:
        with self._passing.traced(request) as span:
            check_open(request)
            passed = self._passing.read(request, deadline_ms(context))

            async def send(replica: Replica, place: Place) -> bytes:
                span.sent(request.id, replica.target)
                call = RawCall(replica, request, passed.size)
                answer, tokens = await call.run(span.metadata(), context.time_remaining())
                span.response()
                place.used_tokens += tokens
                return answer

            return await self._passing.run(passed, span, send)

    async def _stream(
        self, requests: AsyncIterator[pb.ModelInferRequest | DraftgateError], context: _Context
    ) -> None:
        metadata = dict(context.invocation_metadata() or ())
        stream = PassedStream(
            self._passing,
            self._settings,
            fails_with_status=metadata.get("triton_grpc_error") == "true",
            check=check_open,
        )
        with self._one():
            self._streams.add(stream)
            try:
                await stream.run(requests, context)
            finally:
                self._streams.discard(stream)

    def _one(self) -> AbstractContextManager[None]:
        """A call that runs, inside. Raises DraftgateError(UNAVAILABLE) while draining."""
        if self._draining:
            raise shutting_down()
        if (tenant := current_tenant()) is not ANONYMOUS:
            note_tenant(tenant.name)
        return self._activity.one()


def check_open(request: pb.ModelInferRequest) -> None:
    """Raise DraftgateError(UNIMPLEMENTED) for a request to the engine's control plane: that is
    served, with its own rules, by `draftgate.v1.GateService`."""
    if request.model_name != contract.ENGINE_MODEL:
        return
    if any(tensor.name == contract.CONTROL for tensor in request.inputs):
        raise DraftgateError(
            ErrorCode.UNIMPLEMENTED,
            f"{contract.CONTROL}: not open to this protocol, use draftgate.v1.GateService",
            field=contract.CONTROL,
        )


class _Boundary(CallBoundary):
    """Surrounds handlers that are not a generated servicer's."""

    def around(self, method: str, inner: Callable[[Any, _Context], Awaitable[Any]]) -> Any:
        return self._surrounded(method, inner)
