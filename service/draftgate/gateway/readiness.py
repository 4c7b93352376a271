"""Watches whether Triton can generate, and knows what it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.upstream.client import TritonClient
from draftgate.upstream.probe import not_ready_reason
from draftgate.upstream.types import EngineDescription

__all__ = ["Readiness"]

_log = logging.getLogger(__name__)


class Readiness:
    """Looks at Triton again and again; `on_change` hears of every change."""

    def __init__(
        self,
        client: TritonClient,
        *,
        interval_s: float,
        timeout_s: float,
        on_change: Callable[[bool], None],
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._engine: EngineDescription | None = None
        self._reason = "the gateway is starting"

    @property
    def ready(self) -> bool:
        """Whether Triton can generate."""
        return self._engine is not None

    @property
    def engine(self) -> EngineDescription:
        """What is served. Raises DraftgateError(UNAVAILABLE) while Triton is not ready."""
        if self._engine is None:
            raise DraftgateError(ErrorCode.UNAVAILABLE, self._reason)
        return self._engine

    async def watch(self) -> None:
        """Run until cancelled."""
        while True:
            engine = await self._look()
            changed = (engine is None) != (self._engine is None)
            self._engine = engine
            if changed:
                _log.info("serving" if engine else f"not serving: {self._reason}")
                self._on_change(engine is not None)
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> EngineDescription | None:
        try:
            if self._engine is None:
                # It may be another server than before, with other models.
                await self._client.find_profile(self._timeout_s)
            reason = await not_ready_reason(self._client, self._timeout_s)
            if not reason:
                return self._engine or await self._client.describe()
        except DraftgateError as error:
            reason = error.message
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a watcher that ended would leave its last word standing for ever.
            _log.exception("looking at the model server failed")
            reason = "the gateway failed to look at the model server"
        self._reason = reason
        return None
