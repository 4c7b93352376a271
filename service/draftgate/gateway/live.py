"""The configuration while it can change."""

from __future__ import annotations

from draftgate.gateway.config import GatewayConfig, RequestRules

__all__ = ["LiveConfig"]


class LiveConfig:
    """What holds for who asks next. What has been checked once keeps what it was checked with."""

    def __init__(self, config: GatewayConfig) -> None:
        self.now = config
        """To be read once for each request, so that all of it fits together."""

    def take(self, rules: RequestRules) -> None:
        """From now on these rules hold."""
        self.now = self.now.ruled(rules)
