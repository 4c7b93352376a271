"""An OTLP collector in this process that keeps what it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

__all__ = ["Collector", "Exported"]


@dataclass(frozen=True)
class Exported:
    """One span as it arrived."""

    span: Span
    attributes: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def kind(self) -> str:
        return Span.SpanKind.Name(self.span.kind).removeprefix("SPAN_KIND_")

    @property
    def is_error(self) -> bool:
        return bool(self.span.status.code == 2)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback between `start` and `stop`."""

    def __init__(self) -> None:
        self.spans: list[Exported] = []
        self.resources: list[Mapping[str, Any]] = []
        self.stuck = False
        self.target = ""
        self._server = grpc.aio.server()

    async def start(self) -> None:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        if self.stuck:
            await asyncio.sleep(3600)
        for resource in request.resource_spans:
            self.resources.append(_attributes(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += [Exported(span, _attributes(span.attributes)) for span in scope.spans]
        return pb.ExportTraceServiceResponse()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, str(kind))
