"""Another profile, with what this process does for it with the model's tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.text import Tokenizer
from draftgate.upstream.profiles.base import Profile, Reader
from draftgate.upstream.types import EngineDescription, GenerationRequest

__all__ = ["WrappedProfile"]


class WrappedProfile:
    """Knows of the chat template alone: the rest is for who derives from it."""

    def __init__(self, inner: Profile, tokenizer: Tokenizer) -> None:
        self._inner = inner
        self._tokenizer = tokenizer

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def entry(self) -> str:
        return self._inner.entry

    @property
    def models(self) -> Sequence[str]:
        return self._inner.models

    @property
    def stoppable(self) -> Collection[str]:
        return self._inner.stoppable

    @property
    def description(self) -> EngineDescription | None:
        known = self._inner.description
        if known is None:
            return None
        has_template = self._tokenizer.has_chat_template
        return replace(known, has_chat_template=has_template, lacks_tokenizer=False)

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        return await self._inner.generation(request, wire_id)

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        return self._inner.stop(wire_id)

    def reader(self, request: GenerationRequest) -> Reader:
        return self._inner.reader(request)
