"""Whether any replica can generate, and what is served."""

from __future__ import annotations

from collections.abc import Callable

from draftgate.upstream.replicas import ReplicaSet
from draftgate.upstream.types import EngineDescription

__all__ = ["Readiness"]


class Readiness:
    """Follows the replicas; `on_change` hears after every change whether any can generate."""

    def __init__(self, replicas: ReplicaSet, *, on_change: Callable[[bool], None]) -> None:
        self._replicas = replicas
        self._on_change = on_change

    @property
    def ready(self) -> bool:
        """Whether Triton can generate."""
        return self._replicas.serving

    @property
    def engine(self) -> EngineDescription:
        """What is served. Raises DraftgateError(UNAVAILABLE) while no replica can generate."""
        return self._replicas.engine

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            changed = self._replicas.changed
            self._on_change(self._replicas.serving)
            await changed.wait()
