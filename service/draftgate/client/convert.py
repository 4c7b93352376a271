"""From the public protobuf messages to the client's types; nothing else here reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage
from grpc_health.v1 import health_pb2

from draftgate._pb.draftgate.v1 import admin_pb2, gate_pb2, model_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.client.operations import (
    GateAcceptance,
    GateCandidate,
    GateCorrection,
    GateCosts,
    GateMode,
    GateOutcome,
    GatePolicy,
    GateReasonCount,
    GateState,
    GateStep,
    GateSteps,
    LogLevel,
    Replica,
    ReplicaState,
)
from draftgate.client.types import (
    Choice,
    Completion,
    DraftToken,
    Event,
    Finished,
    GenerationDefaults,
    GenerationLimits,
    Model,
    ServingStatus,
    Speculation,
    Started,
    Token,
    TokenAlternative,
    Tokens,
    Usage,
    VerifyStep,
)
from draftgate.contract import DraftSource, FinishReason, GateReason
from draftgate.sampling import Verification

__all__ = [
    "completion",
    "event",
    "gate_state",
    "gate_steps",
    "log_level",
    "model",
    "replica",
    "serving_status",
]

_Kind = TypeVar("_Kind")
_Name = TypeVar("_Name", bound=Enum)


def _named(wire: Any, prefix: str, kind: type[_Name]) -> dict[int, _Name]:
    """The members of `kind` by the numbers that their names have on the wire."""
    names = {name.removeprefix(prefix): number for name, number in wire.items()}
    return {names[name]: each for name, each in kind.__members__.items() if name in names}


_DRAFT_SOURCES = _named(pb.DraftSource, "DRAFT_SOURCE_", DraftSource)
_GATE_REASONS = _named(pb.GateReason, "GATE_REASON_", GateReason)
_FINISH_REASONS = _named(pb.FinishReason, "FINISH_REASON_", FinishReason)
_VERIFICATIONS = _named(pb.Verification, "VERIFICATION_", Verification)
_MODES = _named(gate_pb2.GateMode, "GATE_MODE_", GateMode)
_REPLICA_STATES = _named(admin_pb2.ReplicaState, "REPLICA_STATE_", ReplicaState)
_LOG_LEVELS = _named(admin_pb2.LogLevel, "LOG_LEVEL_", LogLevel)
_SERVING = _named(health_pb2.HealthCheckResponse.ServingStatus, "", ServingStatus)


def event(response: pb.GenerateResponse) -> Event | None:
    """What the response tells; None for a kind of event that this version does not know."""
    match response.WhichOneof("event"):
        case "tokens":
            return _tokens(response.tokens, response.index)
        case "started":
            return _record(Started, response.started, index=response.index)
        case "finished":
            return _finished(response.finished, response.index)
        case _:
            return None


def completion(response: pb.GenerateOnceResponse) -> Completion:
    """The whole generations."""
    choices = [
        Choice(
            each.index,
            each.text,
            tuple(map(_token, each.tokens)),
            _record(Started, each.started, index=each.index),
            _finished(each.finished, each.index),
        )
        for each in response.choices
    ]
    return Completion(tuple(choices), _record(Usage, response.usage))


def model(message: model_pb2.Model) -> Model:
    given = message.defaults.sampling
    sampling = {field.name: value for field, value in given.ListFields()}
    if given.verification in _VERIFICATIONS:
        sampling["verification"] = _VERIFICATIONS[given.verification]
    return _record(
        Model,
        message,
        defaults=GenerationDefaults(message.defaults.max_tokens, sampling),
        limits=_record(GenerationLimits, message.limits),
    )


def gate_state(message: gate_pb2.GateState) -> GateState:
    return _record(
        GateState,
        message,
        policy=_record(
            GatePolicy, message.policy, mode=_MODES.get(message.policy.mode, GateMode.AUTO)
        ),
        reason=_gate_reason(message.reason),
        candidates=_records(GateCandidate, message.candidates),
        acceptance=tuple(
            GateAcceptance(_draft_source(each.draft_source), tuple(each.rates))
            for each in message.acceptance
        ),
        reasons=tuple(
            GateReasonCount(_gate_reason(each.reason), each.steps) for each in message.reasons
        ),
        costs=_costs(message.costs) if message.HasField("costs") else None,
    )


def gate_steps(response: gate_pb2.WatchStepsResponse) -> GateSteps:
    return GateSteps(tuple(map(_gate_step, response.steps)), response.lost)


def replica(message: admin_pb2.Replica) -> Replica:
    state = _REPLICA_STATES.get(message.state, ReplicaState.UNSPECIFIED)
    return _record(Replica, message, state=state)


def log_level(number: int) -> LogLevel:
    return _LOG_LEVELS.get(number, LogLevel.UNSPECIFIED)


def serving_status(number: int) -> ServingStatus:
    return _SERVING.get(number, ServingStatus.UNKNOWN)


def _tokens(chunk: pb.TokenChunk, index: int) -> Tokens:
    return Tokens(
        chunk.text,
        tuple(map(_token, chunk.tokens)),
        tuple(map(_verify_step, chunk.verify_steps)),
        _gate_reason(chunk.gate_reason),
        chunk.batch_rows,
        index,
    )


def _token(token: pb.Token) -> Token:
    # By hand, as there is one for every token of a stream.
    return Token(
        token.id,
        token.source == pb.TOKEN_SOURCE_DRAFT,
        token.text if token.HasField("text") else None,
        token.logprob if token.HasField("logprob") else None,
        tuple(TokenAlternative(each.id, each.logprob) for each in token.alternatives),
    )


def _verify_step(step: pb.VerifyStep) -> VerifyStep:
    return VerifyStep(
        step.drafted,
        step.accepted,
        _draft_source(step.draft_source),
        _records(DraftToken, step.drafts),
    )


def _finished(message: pb.GenerationFinished, index: int) -> Finished:
    matched = message.WhichOneof("matched")
    return Finished(
        _FINISH_REASONS.get(message.finish_reason, FinishReason.NONE),
        None if matched is None else getattr(message, matched),
        _record(Usage, message.usage),
        _record(Speculation, message.speculation) if message.HasField("speculation") else None,
        message.resumes,
        index,
    )


def _costs(message: gate_pb2.GateCosts) -> GateCosts:
    return _record(GateCosts, message, corrections=_records(GateCorrection, message.corrections))


def _gate_step(message: gate_pb2.GateStep) -> GateStep:
    outcomes = tuple(
        _record(GateOutcome, each, draft_source=_draft_source(each.draft_source))
        for each in message.outcomes
    )
    return _record(GateStep, message, reason=_gate_reason(message.reason), outcomes=outcomes)


def _gate_reason(number: int) -> GateReason:
    return _GATE_REASONS.get(number, GateReason.UNKNOWN)


def _draft_source(number: int) -> DraftSource:
    return _DRAFT_SOURCES.get(number, DraftSource.NONE)


def _record(kind: type[_Kind], message: ProtoMessage, **made: object) -> _Kind:
    """`kind`, a dataclass, of the fields of `message` that have the same names, but for those that
    are `made`. What is absent is None."""
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # they all are dataclasses
        if field.name in made:
            continue
        described = message.DESCRIPTOR.fields_by_name[field.name]
        if described.has_presence and not message.HasField(field.name):
            made[field.name] = None
        else:
            value = getattr(message, field.name)
            made[field.name] = tuple(value) if described.is_repeated else value
    return kind(**made)


def _records(kind: type[_Kind], messages: Iterable[ProtoMessage]) -> tuple[_Kind, ...]:
    return tuple(_record(kind, each) for each in messages)
