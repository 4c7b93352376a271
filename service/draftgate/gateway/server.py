"""The gateway as a whole: what serves, in which order it starts, in which order it drains."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftgate._pb.draftgate.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gate_pb2,
    gate_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admin import AdminServicer
from draftgate.gateway.boundary import CallBoundary
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.gate import GateServicer
from draftgate.gateway.generation import GenerationServicer
from draftgate.gateway.health import HealthServicer
from draftgate.gateway.listen import bind
from draftgate.gateway.model import ModelServicer
from draftgate.gateway.readiness import Readiness
from draftgate.telemetry.tracing import Tracing, configured_endpoint
from draftgate.text import Tokenizer
from draftgate.upstream.addresses import parse_addresses
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.replica import Probe
from draftgate.upstream.replicas import ReplicaSet

__all__ = ["Gateway"]

_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    gate_pb2.DESCRIPTOR.services_by_name["GateService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)

_SERVER_OPTIONS = (
    # Else a second gateway would share the port and take half of the connections.
    ("grpc.so_reuseport", 0),
    # Clients whose machine vanished are found without waiting for a write.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_CUT_GRACE_S = 1.0
"""How long cut calls have to send their last event and status."""


class Gateway:
    """One gateway process: `start` it, later `drain` it."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._port: int | None = None

    @property
    def port(self) -> int:
        """The port it listens on. Raises DraftgateError(FAILED_PRECONDITION) while it does not."""
        if self._port is None:
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "the gateway is not running")
        return self._port

    async def start(self) -> None:
        """Listen. It serves as soon as Triton is ready, and says so through its health service.

        Raises DraftgateError: FAILED_PRECONDITION if it cannot listen or read the tokenizer,
        INVALID_ARGUMENT if `triton_target` is no address.
        """
        config = self.config
        addresses = parse_addresses(config.triton_target)
        tokenizer = (
            await asyncio.to_thread(Tokenizer.load, config.tokenizer_dir)
            if config.tokenizer_dir
            else None
        )
        self._tracing = Tracing(
            endpoint=configured_endpoint(config.otlp_endpoint),
            sample_ratio=config.trace_sample_ratio,
        )
        self._replicas = ReplicaSet(
            addresses,
            config.replicas,
            lambda target: TritonClient(TritonClientConfig(target, limits=config.stream_limits)),
            probe=Probe(config.probe_interval_s, config.probe_timeout_s),
        )
        self._health = HealthServicer(_SERVICES)
        self._readiness = Readiness(self._replicas, on_change=self._health.set_serving)
        self._core = GenerationCore(
            self._replicas,
            self._tracing,
            model_name=config.model_name,
            tokenizer=tokenizer,
            resume=config.resume,
        )
        self._gate = GateServicer(self._replicas)
        self._boundary = CallBoundary(self._tracing, prefix="/draftgate.v1.")
        self._server = self._make_server()
        try:
            self._port = bind(self._server, config.listen)
        except DraftgateError:
            await self._server.stop(None)
            await self._close()
            raise
        await self._server.start()
        self._replicas.start()
        self._watching = asyncio.create_task(self._readiness.watch())

    def refuse_new(self) -> None:
        """Not serving and no new work from now on; what runs goes on."""
        self._health.drain()
        self._core.drain()

    async def drain(self, grace_s: float) -> None:
        """Stop: not serving, no new work, streams finish within `grace_s`, the rest is cut.

        Without effect if it has not started or has stopped.
        """
        if self._port is None:
            return
        self.refuse_new()
        if not await self._core.wait_idle(grace_s):
            self._core.cut()
            await self._core.wait_idle(_CUT_GRACE_S)
        self._gate.drain()
        self._boundary.stopping = True
        await self._server.stop(_CUT_GRACE_S)
        self._watching.cancel()
        await asyncio.wait({self._watching})
        await self._close()
        self._port = None

    async def _close(self) -> None:
        await self._replicas.close()
        await self._tracing.shutdown(self.config.flush_timeout_s)

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[self._boundary], options=_SERVER_OPTIONS)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.config, self._core, self._readiness), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self.config, self._readiness), server
        )
        gate_pb2_grpc.add_GateServiceServicer_to_server(self._gate, server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._replicas, self._core, self.refuse_new), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = "grpc.health.v1.Health"
        reflection.enable_server_reflection((*_SERVICES, health, reflection.SERVICE_NAME), server)
        return server
