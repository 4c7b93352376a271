"""The servicer of `draftgate.v1.ModelService`."""

from __future__ import annotations

from typing import Any

import grpc.aio

from draftgate._pb.draftgate.v1 import model_pb2, model_pb2_grpc
from draftgate.gateway import convert, validate
from draftgate.gateway.live import LiveConfig
from draftgate.gateway.readiness import Readiness

__all__ = ["ModelServicer"]


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Raises DraftgateError; the call boundary makes it the status."""

    def __init__(self, config: LiveConfig, readiness: Readiness) -> None:
        self._config = config
        self._readiness = readiness

    async def GetModel(  # noqa: N802  # the name is the protocol's
        self,
        request: model_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> model_pb2.GetModelResponse:
        config = self._config.now
        validate.check_model_name("name", request.name, config)
        answer = model_pb2.GetModelResponse(
            model=convert.model_message(config, self._readiness.engine)
        )
        answer.time.GetCurrentTime()
        return answer
