"""The gRPC surface in front of Triton."""

from __future__ import annotations

from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.server import Gateway

__all__ = ["Gateway", "GatewayConfig"]
