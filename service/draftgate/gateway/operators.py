"""The listener for operators: what changes how the gateway works is served there alone."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from draftgate._pb.draftgate.v1 import admin_pb2, admin_pb2_grpc, gate_pb2, gate_pb2_grpc
from draftgate.gateway.admin import AdminServicer
from draftgate.gateway.gate import GateServicer
from draftgate.gateway.health import HealthServicer

__all__ = ["OperatorServer", "describe"]

_SERVICES = (
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    gate_pb2.DESCRIPTOR.services_by_name["GateService"].full_name,
)


class OperatorServer:
    """AdminService, the gate with its policy, health and reflection, on a server of their own."""

    def __init__(self, server: grpc.aio.Server, admin: AdminServicer, gate: GateServicer) -> None:
        """`server` has no services yet and is bound by the caller."""
        self.server = server
        self.health = HealthServicer(_SERVICES)
        self._gate = gate
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
        gate_pb2_grpc.add_GateServiceServicer_to_server(gate, server)
        describe(server, self.health, _SERVICES)

    async def stop(self, grace_s: float) -> None:
        """End its calls, the watches first, which nothing else would."""
        self._gate.drain()
        await self.server.stop(grace_s)


def describe(server: grpc.aio.Server, health: HealthServicer, services: Sequence[str]) -> None:
    """Have a server tell of its services: whether they serve, and what they are."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*services, "grpc.health.v1.Health", reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
