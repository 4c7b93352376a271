"""What a kind of model repository has to answer for the gateway to stand in front of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from draftgate.upstream.types import Chunk, EngineDescription, GenerationRequest

__all__ = ["Profile", "Reader", "refuse_unless_default", "unsupported"]


class Reader(Protocol):
    """Follows the responses to one request."""

    def read(self, response: pb.ModelInferResponse) -> Chunk | None:
        """The chunk that a response makes; None for one that tells the caller nothing.

        Raises DraftgateError(INTERNAL) for a response that is not as the profile has it.
        """

    def end(self) -> Chunk | None:
        """The chunk that the end of a stream without failure makes, if no last one came before.

        Raises DraftgateError(INTERNAL) if the stream may not end there.
        """


class Profile(Protocol):
    """Between the domain and the tensors of one kind of model repository. Has no state."""

    @property
    def name(self) -> str:
        """For messages and logs."""

    @property
    def entry(self) -> str:
        """The model that generations are sent to."""

    @property
    def models(self) -> Sequence[str]:
        """The models that have to be ready."""

    @property
    def stoppable(self) -> Collection[str]:
        """The models whose running requests end on `stop`."""

    @property
    def description(self) -> EngineDescription | None:
        """What is served, as far as the models' configuration tells. None: the engine has a control
        plane and describes itself."""

    async def generation(self, request: GenerationRequest, wire_id: str) -> pb.ModelInferRequest:
        """The request to `entry`.

        Raises DraftgateError(UNIMPLEMENTED or INVALID_ARGUMENT) naming the first thing asked for
        that these models cannot do.
        """

    def stop(self, wire_id: str) -> pb.ModelInferRequest | None:
        """The request that ends the generation of the same id. None: cancelling its RPC does."""

    def reader(self, request: GenerationRequest) -> Reader:
        """What reads the responses to that request."""


def unsupported(field: str, profile: str) -> DraftgateError:
    """The error for something that a profile's models cannot do."""
    return DraftgateError(
        ErrorCode.UNIMPLEMENTED,
        f"{field}: the models behind this gateway ({profile}) cannot do that",
        field=field,
    )


def refuse_unless_default(
    sampling: SamplingParams, supported: Collection[str], profile: str
) -> None:
    """Raise DraftgateError(UNIMPLEMENTED) for the first field beyond `supported` that asks for
    something."""
    for name, field in SamplingParams.__dataclass_fields__.items():
        if name not in supported and getattr(sampling, name) != field.default:
            raise unsupported(name, profile)
