"""Calls that the server's own process makes: no network, and no credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from draftgate._pb.draftgate.v1 import generation_pb2, model_pb2
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import convert, validate
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.readiness import Readiness

__all__ = ["LocalClient"]

_LOOK_S = 0.05


class LocalClient:
    """What a client does at the start, for a server that asks clients for a certificate or a key.

    Every method raises DraftgateError.
    """

    def __init__(self, config: LiveConfig, core: GenerationCore, readiness: Readiness) -> None:
        self._config = config
        self._core = core
        self._readiness = readiness

    async def serving(self, *, timeout_s: float) -> None:
        """Wait until generations can run."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._readiness.ready:  # noqa: ASYNC110  # once, at the start
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            message = f"not serving within {timeout_s:g} s"
            raise DraftgateError(ErrorCode.DEADLINE_EXCEEDED, message) from error

    async def model(self, *, timeout_s: float) -> model_pb2.Model:
        """The served model."""
        return convert.model_message(self._config.now, self._readiness.engine)

    async def generate(
        self, request: generation_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The events of one generation. Closing the generator ends it."""
        call = validate.check_generation(
            convert.generation_input(request),
            self._config.now,
            self._readiness.engine,
            deadline_ms=int(timeout_s * 1000),
        )
        async with self._core.run(call) as events:
            async for event in events:
                yield convert.response(event)
