"""The gateway as a whole: what serves, in which order it starts, in which order it drains."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import grpc.aio

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
from draftgate.gateway.announcements import Announcements
from draftgate.gateway.auth import Authenticator, AuthInterceptor, ServerCertificates
from draftgate.gateway.boundary import CallBoundary
from draftgate.gateway.config import GatewayConfig, RequestRules
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.gate import GateServicer
from draftgate.gateway.generation import GenerationServicer
from draftgate.gateway.health import HealthServicer
from draftgate.gateway.listen import bind
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.local import LocalClient
from draftgate.gateway.model import ModelServicer
from draftgate.gateway.operators import OperatorServer, describe
from draftgate.gateway.orders import DrainReplica, Order, RefuseNew, Reload, SetLogLevel
from draftgate.gateway.passed_stream import StreamSettings
from draftgate.gateway.passing import Passing
from draftgate.gateway.passthrough import Passthrough
from draftgate.gateway.readiness import Readiness
from draftgate.gateway.server_options import server_options
from draftgate.gateway.session_servicer import SessionServicer
from draftgate.gateway.standard import StandardBoundary
from draftgate.gateway.team import Admits, Team
from draftgate.gateway.tokenizer import TokenizerServicer
from draftgate.gateway.unknown_methods import make_server
from draftgate.telemetry.tracing import Tracing, configured_endpoint
from draftgate.text import Tokenizer
from draftgate.upstream.addresses import parse_addresses
from draftgate.upstream.client import TritonClient, TritonClientConfig
from draftgate.upstream.coalescing import Coalescing
from draftgate.upstream.replica import Probe
from draftgate.upstream.replicas import ReplicaSet

__all__ = ["Gateway"]

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    gate_pb2.DESCRIPTOR.services_by_name["GateService"].full_name,
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
    _ADMIN,
    passthrough.SERVICE,
)

_UNKNOWN_ROWS = 64
"""Generations that run at once where the engine does not tell how many it takes."""

_CUT_GRACE_S = 1.0
"""How long cut calls have to send their last event and status."""


class Gateway:
    """One gateway process: `start` it, later `drain` it."""

    def __init__(self, config: GatewayConfig, *, team: Team | None = None) -> None:
        """One of a `team` shares its port, and what may run, with the others."""
        self._live = LiveConfig(config)
        self._team = team
        self._port: int | None = None
        self._operators: OperatorServer | None = None
        self._operators_port = 0
        self._certificates: ServerCertificates | None = None
        self._operators_certificates: ServerCertificates | None = None
        self._authenticator: Authenticator | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def config(self) -> GatewayConfig:
        """As it holds now."""
        return self._live.now

    @property
    def port(self) -> int:
        """The port it listens on. Raises DraftgateError(FAILED_PRECONDITION) while it does not."""
        if self._port is None:
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "the gateway is not running")
        return self._port

    @property
    def address(self) -> str:
        """Where it listens. Raises as `port` does."""
        return _with_port(self.config.listen, self.port)

    @property
    def admin_address(self) -> str:
        """Where it listens for operators; empty if they have no listener of their own."""
        if self.config.admin_listen is None:
            return ""
        return _with_port(self.config.admin_listen, self._operators_port)

    @property
    def local(self) -> LocalClient:
        """For calls of this process itself. Raises DraftgateError(FAILED_PRECONDITION) while the
        gateway is not running."""
        _ = self.port
        return LocalClient(self._live, self._core, self._readiness)

    async def start(self) -> None:
        """Listen. It serves as soon as Triton is ready, and says so through its health service.

        Raises DraftgateError if it cannot listen, or read the tokenizer, the model's defaults, the
        certificate or the tenants; INVALID_ARGUMENT if `triton_target` is no address.
        """
        self._live.take(await self._completed(RequestRules.of(self.config)))
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
        coalescing = Coalescing(config.coalescing) if config.coalescing.max_delay_ms else None
        self._replicas = ReplicaSet(
            addresses,
            config.replicas,
            lambda target: TritonClient(
                TritonClientConfig(target, entry_model=config.entry, limits=config.stream_limits),
                tokenizer,
                coalescing,
            ),
            probe=Probe(config.probe_interval_s, config.probe_timeout_s),
        )
        # Operators who have a listener of their own are served there alone.
        elsewhere = (_ADMIN,) if config.admin_listen else ()
        self._services = [each for each in _SERVICES if each not in elsewhere]
        self._health = HealthServicer(self._services)
        self._readiness = Readiness(self._replicas, on_change=self._replicas_changed)
        self._admission: Admits = (
            self._team.admission if self._team else Admission(config.admission)
        )
        self._core = GenerationCore(
            self._replicas,
            self._tracing,
            self._admission,
            model_name=config.model_name,
            tokenizer=tokenizer,
            resume=config.resume,
        )
        self._gate = GateServicer(self._replicas, steered_elsewhere=bool(config.admin_listen))
        self._sessions = SessionServicer(self._live, self._core, self._readiness)
        self._tokenizing = TokenizerServicer(self._live, tokenizer)
        self._passthrough = Passthrough(
            Passing(self._replicas, self._admission, self._tracing),
            self._tracing,
            StreamSettings(config.stream_limits, config.write_timeout_s),
        )
        self._boundary = CallBoundary(self._tracing, prefix="/draftgate.v1.")
        self._server = self._make_server()
        try:
            if config.admin_listen:
                admin = AdminServicer(self._replicas, self.tell)
                gate = GateServicer(self._replicas)
                self._operators = OperatorServer(self._bare_server(), admin, gate)
                self._operators_port = self._bind(
                    self._operators.server, config.admin_listen, self._operators_certificates
                )
            self._port = self._bind(self._server, config.listen, self._certificates)
        except DraftgateError:
            await self._server.stop(None)
            await self._close()
            raise
        self._announcements = Announcements(
            self._replicas,
            model=config.model_name,
            address=self.address,
            admin_address=self.admin_address,
            tls=self._certificates is not None,
        )
        await self._server.start()
        if self._operators:
            await self._operators.server.start()
        self._replicas.start()
        self._tasks.add(asyncio.create_task(self._readiness.watch()))
        if self._authenticator:
            self._tasks.add(asyncio.create_task(self._authenticator.watch()))

    def reload(self) -> None:
        """Take up tenants, keys and certificates that have changed, now. Blocks to read files.

        Raises DraftgateError naming the first file that is of no use: what it was before stands.
        """
        if self._certificates:
            self._certificates.check()
        if self._authenticator:
            self._authenticator.reload()  # All or nothing, and so the last that can fail.

    def refuse_new(self) -> None:
        """Not serving and no new work from now on; what runs goes on."""
        self._health.drain()
        if self._operators:
            self._operators.health.drain()
        self._core.drain()
        self._passthrough.drain()

    async def tell(self, order: Order) -> int:
        """Have an order carried out, by the whole team if there is one, and return how many
        generations run there. Raises as `carry_out` does."""
        if self._team:
            return await self._team.tell(order)
        await self.carry_out(order)
        return self._core.running

    async def carry_out(self, order: Order) -> None:
        """Do what an operator orders, here alone. To be called while it runs.

        Raises DraftgateError for a Reload with something that is of no use: all stays as it was.
        """
        if isinstance(order, RefuseNew):
            self.refuse_new()
        elif isinstance(order, DrainReplica):
            self._replicas.set_draining(order.address, order.draining, move=order.move)
        elif isinstance(order, SetLogLevel):
            logging.getLogger("draftgate").setLevel(order.level)
        elif isinstance(order, Reload):
            rules = await self._completed(order.rules) if order.rules else None
            await asyncio.to_thread(self.reload)
            # Nothing below fails, or waits: no request is checked by half of it.
            if rules is not None:
                self._live.take(rules)
            if order.admission is not None:
                self._admission.configure(order.admission)

    def cut(self) -> None:
        """End with UNAVAILABLE what still runs, though a drain may have given it more time."""
        self._core.cut()
        self._passthrough.cut()

    async def drain(self, grace_s: float) -> None:
        """Stop: not serving, no new work, streams finish within `grace_s`, the rest is cut.

        Without effect if it has not started or has stopped.
        """
        if self._port is None:
            return
        self.refuse_new()
        if not await self._idle(grace_s):
            self.cut()
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

    async def _completed(self, rules: RequestRules) -> RequestRules:
        """With what the model's own file says. Raises DraftgateError as
        `RequestDefaults.completed` does."""
        folder = self.config.tokenizer_dir
        defaults = await asyncio.to_thread(rules.defaults.completed, folder)
        return replace(rules, defaults=defaults)

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
        if self._operators:
            self._operators.health.set_serving(serving)
        self._announcements.changed(serving)

    async def _idle(self, timeout_s: float) -> bool:
        """Wait for everything that runs to end; False if something still runs then."""
        return all(
            await asyncio.gather(
                self._core.wait_idle(timeout_s), self._passthrough.wait_idle(timeout_s)
            )
        )

    def _bind(
        self, server: grpc.aio.Server, listen: str, certificates: ServerCertificates | None
    ) -> int:
        """The port that it got. Raises DraftgateError as `bind` does."""
        return bind(
            server,
            listen,
            certificates.credentials if certificates else None,
            insecure=self.config.security.insecure,
            shared=self._team is not None,
        )

    async def _close(self) -> None:
        if self._operators:
            await self._operators.stop(_CUT_GRACE_S)
        await self._replicas.close()
        await self._tracing.shutdown(self.config.flush_timeout_s)

    def _read_security(self) -> None:
        security = self.config.security
        if security.tls:
            self._certificates = ServerCertificates(security.tls)
            # Not shared: a listener is told of a change once.
            self._operators_certificates = ServerCertificates(security.tls)
        if security.tenants_file:
            self._authenticator = Authenticator(security)

    def _bare_server(self) -> grpc.aio.Server:
        """One without services."""
        security = self.config.security
        interceptors: list[grpc.aio.ServerInterceptor] = [self._boundary, StandardBoundary()]
        if self._authenticator:
            auth = AuthInterceptor(self._authenticator, open_reflection=security.open_reflection)
            interceptors.insert(0, auth)
        return make_server(
            interceptors=interceptors,
            options=server_options(
                security.limits,
                shared=self._team is not None,
                max_connection_age_s=self.config.max_connection_age_s,
            ),
        )

    def _make_server(self) -> grpc.aio.Server:
        server = self._bare_server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self._live, self._core, self._readiness), server
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self._live, self._readiness), server
        )
        gate_pb2_grpc.add_GateServiceServicer_to_server(self._gate, server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self._sessions, server)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._tokenizing, server)
        server.add_registered_method_handlers(passthrough.SERVICE, self._passthrough.handlers())
        if not self.config.admin_listen:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(
                AdminServicer(self._replicas, self.tell), server
            )
        describe(server, self._health, self._services)
        return server


def _with_port(listen: str, port: int) -> str:
    return f"{listen.rpartition(':')[0]}:{port}"
