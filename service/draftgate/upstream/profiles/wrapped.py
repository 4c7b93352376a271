"""Another profile, with something done in this process before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.upstream.profiles.base import Profile, Reader
from draftgate.upstream.types import EngineDescription, GenerationRequest

__all__ = ["WrappedProfile"]


class WrappedProfile:
    """Does nothing itself: what is done is for who derives from it."""

    def __init__(self, inner: Profile) -> None:
        self._inner = inner

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
        return self._inner.description

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        return await self._inner.generation(request, wire_id)

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        return self._inner.stop(wire_id)

    def reader(self, request: GenerationRequest) -> Reader:
        return self._inner.reader(request)
