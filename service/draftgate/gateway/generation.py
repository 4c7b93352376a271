"""The servicer of `draftgate.v1.GenerationService`."""

from __future__ import annotations

from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2_grpc
from draftgate.errors import DraftgateError, invalid_argument
from draftgate.gateway import convert, validate
from draftgate.gateway.calls import Context, deadline_ms, writing
from draftgate.gateway.choices import run_choices
from draftgate.gateway.core import GenerationCore
from draftgate.gateway.field_names import within
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.once import collect
from draftgate.gateway.readiness import Readiness

__all__ = ["GenerationServicer"]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, config: LiveConfig, core: GenerationCore, readiness: Readiness) -> None:
        self._config = config
        self._core = core
        self._readiness = readiness

    async def Generate(  # type: ignore[override]  # noqa: N802  # writes instead of yielding
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        async with (
            run_choices(self._core, self._checked(request, context)) as events,
            writing(context, self._config.now.write_timeout_s) as write,
        ):
            async for event in events:
                await write(convert.response(event))

    async def GenerateOnce(  # noqa: N802  # the name is the protocol's
        self, request: pb.GenerateOnceRequest, context: Context
    ) -> pb.GenerateOnceResponse:
        if not request.HasField("generation"):
            raise invalid_argument("generation", None, "a generation to run")
        try:
            call = self._checked(request.generation, context)
            async with run_choices(self._core, call) as events:
                choices = await collect(events)
        except DraftgateError as error:
            raise within("generation", error) from None
        return convert.once_response(choices, return_tokens=request.return_tokens)

    def _checked(self, request: pb.GenerateRequest, context: Context) -> validate.GenerationCall:
        return validate.check_generation(
            convert.generation_input(request),
            self._config.now,
            self._readiness.engine,
            deadline_ms=deadline_ms(context),
        )
