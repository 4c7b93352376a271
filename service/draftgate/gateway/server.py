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
    session_pb2,
    session_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import passthrough
from draftgate.gateway.admin import AdminServicer
from draftgate.gateway.admission import Admission, Capacity
from draftgate.gateway.auth import Authenticator, AuthInterceptor, ServerCertificates, ServerLimits
from draftgate.gateway.boundary import CallBoundary
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.gate import GateServicer
from draftgate.gateway.generation import GenerationServicer
from draftgate.gateway.health import HealthServicer
from draftgate.gateway.listen import bind
from draftgate.gateway.local import LocalClient
from draftgate.gateway.model import ModelServicer
from draftgate.gateway.passed_stream import StreamSettings
from draftgate.gateway.passthrough import Passthrough
from draftgate.gateway.readiness import Readiness
from draftgate.gateway.session_servicer import SessionServicer
from draftgate.gateway.standard import StandardBoundary
from draftgate.gateway.tokenizer import TokenizerServicer
from draftgate.gateway.unknown_methods import make_server
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
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    passthrough.SERVICE,
)

_SERVER_OPTIONS = (
    # Else a second gateway would share the port and take half of the connections.
    ("grpc.so_reuseport", 0),
    # Clients whose machine vanished are found without waiting for a write.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)

_UNKNOWN_ROWS = 64
"""Generations that run at once where the engine does not tell how many it takes."""

_CUT_GRACE_S = 1.0
"""How long cut calls have to send their last event and status."""


class Gateway:
    """One gateway process: `start` it, later `drain` it."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._port: int | None = None
        self._certificates: ServerCertificates | None = None
        self._authenticator: Authenticator | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port it listens on. Raises DraftgateError(FAILED_PRECONDITION) while it does not."""
        if self._port is None:
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "the gateway is not running")
        return self._port

    @property
    def local(self) -> LocalClient:
        """For calls of this process itself. Raises DraftgateError(FAILED_PRECONDITION) while the
        gateway is not running."""
        _ = self.port
        return LocalClient(self.config, self._core, self._readiness)

    async def start(self) -> None:
        """Listen. It serves as soon as Triton is ready, and says so through its health service.

        Raises DraftgateError if it cannot listen, or read the tokenizer, the certificate or the
        tenants; INVALID_ARGUMENT if `triton_target` is no address.
        """
        config = self.config
        addresses = parse_addresses(config.triton_target)
        await asyncio.to_thread(self._read_security)
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
            lambda target: TritonClient(
                TritonClientConfig(target, entry_model=config.entry, limits=config.stream_limits),
                tokenizer,
            ),
            probe=Probe(config.probe_interval_s, config.probe_timeout_s),
        )
        self._health = HealthServicer(_SERVICES)
        self._readiness = Readiness(self._replicas, on_change=self._replicas_changed)
        self._admission = Admission(config.admission)
        self._core = GenerationCore(
            self._replicas,
            self._tracing,
            self._admission,
            model_name=config.model_name,
            tokenizer=tokenizer,
            resume=config.resume,
        )
        self._gate = GateServicer(self._replicas)
        self._sessions = SessionServicer(config, self._core, self._readiness)
        self._tokenizing = TokenizerServicer(config, tokenizer)
        self._passthrough = Passthrough(
            lambda: self._replicas.named("").client,
            self._tracing,
            StreamSettings(config.stream_limits, config.write_timeout_s),
        )
        self._boundary = CallBoundary(self._tracing, prefix="/draftgate.v1.")
        self._server = self._make_server()
        try:
            self._port = bind(
                self._server,
                config.listen,
                self._certificates.credentials if self._certificates else None,
                insecure=config.security.insecure,
            )
        except DraftgateError:
            await self._server.stop(None)
            await self._close()
            raise
        await self._server.start()
        self._replicas.start()
        self._tasks.add(asyncio.create_task(self._readiness.watch()))
        if self._authenticator:
            self._tasks.add(asyncio.create_task(self._authenticator.watch()))

    def reload(self) -> None:
        """Take up tenants, keys and certificates that have changed, now. Blocks to read files.

        Raises DraftgateError naming the first file that is of no use: what it was before stands.
        """
        if self._authenticator:
            self._authenticator.reload()
        if self._certificates:
            self._certificates.check()

    def refuse_new(self) -> None:
        """Not serving and no new work from now on; what runs goes on."""
        self._health.drain()
        self._core.drain()
        self._passthrough.drain()

    async def drain(self, grace_s: float) -> None:
        """Stop: not serving, no new work, streams finish within `grace_s`, the rest is cut.

        Without effect if it has not started or has stopped.
        """
        if self._port is None:
            return
        self.refuse_new()
        if not await self._idle(grace_s):
            self._core.cut()
            self._passthrough.cut()
            await self._idle(_CUT_GRACE_S)
        self._gate.drain()
        self._sessions.drain()
        self._boundary.stopping = True
        await self._server.stop(_CUT_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        await self._close()
        self._port = None

    def _replicas_changed(self, serving: bool) -> None:
        engines = [each.engine for each in self._replicas.replicas if each.serving and each.engine]
        if engines:
            kv_tokens = [engine.kv_total_tokens for engine in engines]
            self._admission.set_capacity(
                Capacity(
                    sum(engine.max_batch_rows or _UNKNOWN_ROWS for engine in engines),
                    sum(kv_tokens) if all(kv_tokens) else 0,
                )
            )
        self._health.set_serving(serving)

    async def _idle(self, timeout_s: float) -> bool:
        """Wait for everything that runs to end; False if something still runs then."""
        return all(
            await asyncio.gather(
                self._core.wait_idle(timeout_s), self._passthrough.wait_idle(timeout_s)
            )
        )

    async def _close(self) -> None:
        await self._replicas.close()
        await self._tracing.shutdown(self.config.flush_timeout_s)

    def _read_security(self) -> None:
        security = self.config.security
        if security.tls:
            self._certificates = ServerCertificates(security.tls)
        if security.tenants_file:
            self._authenticator = Authenticator(security)

    def _make_server(self) -> grpc.aio.Server:
        security = self.config.security
        interceptors: list[grpc.aio.ServerInterceptor] = [self._boundary, StandardBoundary()]
        if self._authenticator:
            auth = AuthInterceptor(self._authenticator, open_reflection=security.open_reflection)
            interceptors.insert(0, auth)
        server = make_server(
            interceptors=interceptors,
            options=(*_SERVER_OPTIONS, *_limit_options(security.limits)),
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self.config, self._core, self._readiness), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self.config, self._readiness), server
        )
        gate_pb2_grpc.add_GateServiceServicer_to_server(self._gate, server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self._sessions, server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._tokenizing, server)
        server.add_registered_method_handlers(passthrough.SERVICE, self._passthrough.handlers())
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self._replicas, self._core, self.refuse_new), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        health = "grpc.health.v1.Health"
        reflection.enable_server_reflection((*_SERVICES, health, reflection.SERVICE_NAME), server)
        return server


def _limit_options(limits: ServerLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        # Between the two, gRPC would refuse some calls and not others.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
    )
