"""The profile `draftgate`: our own models, by the tensor contract."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftgate import contract
from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.upstream import requests, responses
from draftgate.upstream.profiles.base import Reader, unsupported
from draftgate.upstream.profiles.model_view import ModelView
from draftgate.upstream.types import Chunk, EngineDescription, GenerationRequest, TokenPrompt

__all__ = ["NAME", "DraftgateProfile", "is_engine", "is_ensemble"]

NAME = "draftgate"


def is_ensemble(model: ModelView) -> bool:
    """Whether it is our ensemble."""
    return (
        model.name == contract.ENSEMBLE_MODEL
        and model.has_inputs("text_input", "messages", "input_ids", "max_tokens")
        and model.has_outputs("text_output", "chunk_index", "finish_reason")
    )


def is_engine(model: ModelView) -> bool:
    """Whether it is our engine."""
    return (
        model.name == contract.ENGINE_MODEL
        and model.has_inputs("input_ids", "max_tokens", contract.STOP, contract.CONTROL)
        and model.has_outputs("output_ids", "chunk_index", "finish_reason")
    )


class DraftgateProfile:
    """Everything that the API offers, with the engine's control plane. The ensemble takes and gives
    text; the engine, entered straight, takes and gives ids alone."""

    def __init__(self, *, at_engine: bool = False) -> None:
        self._at_engine = at_engine

    @property
    def name(self) -> str:
        return NAME

    @property
    def entry(self) -> str:
        return contract.ENGINE_MODEL if self._at_engine else contract.ENSEMBLE_MODEL

    @property
    def models(self) -> Sequence[str]:
        if self._at_engine:
            return (contract.ENGINE_MODEL,)
        return (
            contract.ENSEMBLE_MODEL,
            contract.PREPROCESSING_MODEL,
            contract.ENGINE_MODEL,
            contract.POSTPROCESSING_MODEL,
        )

    @property
    def stoppable(self) -> Collection[str]:
        return {contract.ENSEMBLE_MODEL, contract.ENGINE_MODEL}

    @property
    def description(self) -> EngineDescription | None:
        return None

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        if not self._at_engine:
            return requests.generation_request(request, wire_id)
        if not isinstance(request.prompt, TokenPrompt):
            raise unsupported(request.prompt.tensor, "draftgate's engine, without a tokenizer here")
        return requests.engine_request(request, wire_id)

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        return requests.stop_request(wire_id)

    def reader(self, request: GenerationRequest) -> Reader:
        return _Reader()


class _Reader:
    def read(self, response: pb.ModelInferResponse) -> Chunk | None:
        if not responses.has_outputs(response):
            return None
        return responses.parse_chunk(response)

    def end(self) -> Chunk | None:
        raise responses.broken("the stream ended without a finish reason")
