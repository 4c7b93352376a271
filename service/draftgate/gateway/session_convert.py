"""Between the messages of a session and its commands and answers; nothing else knows both."""

from __future__ import annotations

from collections.abc import AsyncIterator

from draftgate._pb.draftgate.v1 import session_pb2 as pb
from draftgate.errors import DraftgateError, invalid_argument
from draftgate.gateway import convert, status
from draftgate.gateway.field_names import within
from draftgate.gateway.session import Cancel, Command, Grant, Refused, Start
from draftgate.gateway.session_generation import Answer, Ended, Happened
from draftgate.gateway.validate import GenerationInput

__all__ = ["commands", "response"]


async def commands(
    requests: AsyncIterator[pb.SessionRequest | DraftgateError],
) -> AsyncIterator[Command | Refused]:
    """The requests as commands; one that cannot be read, or is none, as its refusal."""
    async for request in requests:
        if isinstance(request, DraftgateError):
            yield Refused("", request)
            continue
        try:
            yield _command(request)
        except DraftgateError as error:
            yield Refused(request.id, error)


def response(answer: Answer | Refused) -> pb.SessionResponse:
    """The answer as it goes to the client."""
    if isinstance(answer, Happened):
        message = pb.SessionResponse(id=answer.id)
        convert.fill(message.event, answer.event)
        return message
    if isinstance(answer, Ended):
        ended = pb.SessionStatus() if answer.error is None else _status(answer.error)
        return pb.SessionResponse(id=answer.id, ended=ended)
    return pb.SessionResponse(id=answer.id, refused=_status(answer.error))


def _command(request: pb.SessionRequest) -> Command:
    action = request.WhichOneof("action")
    if action == "start":
        start = request.start
        return Start(
            request.id,
            _given(start),
            timeout_ms=start.timeout_ms if start.HasField("timeout_ms") else None,
            credit=start.credits if start.HasField("credits") else None,
        )
    if action == "cancel":
        return Cancel(request.id)
    if action == "credits":
        return Grant(request.id, request.credits.tokens_events)
    raise invalid_argument("action", None, "start, cancel or credits")


def _given(start: pb.SessionStart) -> GenerationInput:
    if not start.HasField("generation"):
        raise invalid_argument("start.generation", None, "a generation to run")
    try:
        return convert.generation_input(start.generation)
    except DraftgateError as error:
        raise within("start.generation", error) from None


def _status(error: DraftgateError) -> pb.SessionStatus:
    found = status.to_status(error)
    return pb.SessionStatus(code=found.code, message=found.message, details=found.details)
