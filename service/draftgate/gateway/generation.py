"""The servicer of `draftgate.v1.GenerationService`."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2_grpc
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway import convert, validate
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.readiness import Readiness

__all__ = ["GenerationServicer"]

_INT32_MAX = 2**31 - 1

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, config: GatewayConfig, core: GenerationCore, readiness: Readiness) -> None:
        self._config = config
        self._core = core
        self._readiness = readiness

    async def Generate(  # type: ignore[override]  # noqa: N802  # writes instead of yielding
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        call = validate.check_generation(
            convert.generation_input(request),
            self._config,
            self._readiness.engine,
            deadline_ms=_deadline_ms(context),
        )
        async with self._core.run(call) as events:
            async for event in events:
                await self._write(context, convert.response(event))

    async def _write(self, context: _Context, response: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await context.write(response)
        except TimeoutError as error:
            raise DraftgateError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"the stream was not read for {self._config.write_timeout_s:g} s",
            ) from error


def _deadline_ms(context: _Context) -> int | None:
    remaining_s = context.time_remaining()
    if remaining_s is None:
        return None
    return max(1, min(int(remaining_s * 1000), _INT32_MAX))
