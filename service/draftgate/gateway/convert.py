"""Between the public protobuf messages and the domain; nothing else knows both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from draftgate._pb.draftgate.v1 import admin_pb2, model_pb2
from draftgate._pb.draftgate.v1 import generation_pb2 as pb
from draftgate.contract import DraftSource, FinishReason
from draftgate.errors import invalid_argument
from draftgate.gateway.admission import Priority
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.defaults import RequestDefaults
from draftgate.gateway.events import Event, Finished, Started, Token, Tokens
from draftgate.gateway.once import Choice
from draftgate.gateway.validate import GenerationInput, default_sampling
from draftgate.sampling import Verification
from draftgate.telemetry.report import GenerationReport
from draftgate.text import Message
from draftgate.upstream.replica import Replica, ReplicaState
from draftgate.upstream.types import EngineDescription

__all__ = [
    "DRAFT_SOURCES",
    "chat_messages",
    "fill",
    "generation_input",
    "model_message",
    "once_response",
    "replica_message",
    "response",
]

_FINISH_REASONS: Mapping[str, pb.FinishReason.ValueType] = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: pb.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
}
DRAFT_SOURCES = {
    DraftSource.NONE: pb.DRAFT_SOURCE_UNSPECIFIED,
    DraftSource.EAGLE: pb.DRAFT_SOURCE_EAGLE,
    DraftSource.NGRAM: pb.DRAFT_SOURCE_NGRAM,
    DraftSource.DRAFT_MODEL: pb.DRAFT_SOURCE_DRAFT_MODEL,
    DraftSource.MEDUSA: pb.DRAFT_SOURCE_MEDUSA,
}
"""The protocol's number of each drafter."""
_REPLICA_STATES = {
    ReplicaState.NOT_READY: admin_pb2.REPLICA_STATE_NOT_READY,
    ReplicaState.READY: admin_pb2.REPLICA_STATE_READY,
    ReplicaState.PROBATION: admin_pb2.REPLICA_STATE_PROBATION,
    ReplicaState.EJECTED: admin_pb2.REPLICA_STATE_EJECTED,
    ReplicaState.DRAINING: admin_pb2.REPLICA_STATE_DRAINING,
}
_VERIFICATIONS: Mapping[int, Verification | None] = {
    pb.VERIFICATION_UNSPECIFIED: None,
    pb.VERIFICATION_REJECTION: Verification.REJECTION,
    pb.VERIFICATION_COUPLED: Verification.COUPLED,
}
_DEFAULTED = [
    name
    for name in pb.SamplingParameters.DESCRIPTOR.fields_by_name
    if name in RequestDefaults.__dataclass_fields__
]
"""The fields of SamplingParameters that have a default which is a value."""
_PRIORITIES: Mapping[int, Priority] = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BATCH: Priority.BATCH,
}


def generation_input(request: pb.GenerateRequest) -> GenerationInput:
    """The request as the domain sees it, not checked yet.

    Raises DraftgateError(INVALID_ARGUMENT) for an enum's number that the domain has no word for.
    """
    return GenerationInput(
        model=request.model,
        request_id=request.request_id,
        prompt=request.prompt if request.HasField("prompt") else None,
        messages=chat_messages(request.messages),
        input_ids=tuple(request.input_ids),
        resume_len=request.resume_len if request.HasField("resume_len") else None,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=_sampling(request),
        return_token_text=request.return_token_text,
        stop=tuple(request.stop),
        n=request.n if request.HasField("n") else None,
        echo=request.echo,
        priority=_priority(request.priority),
    )


def chat_messages(messages: Iterable[pb.ChatMessage]) -> tuple[Message, ...]:
    """The conversation as the domain sees it."""
    return tuple(Message(each.role, each.content) for each in messages)


def response(event: Event) -> pb.GenerateResponse:
    """The event as it goes to the client."""
    message = pb.GenerateResponse()
    fill(message, event)
    return message


def fill(message: pb.GenerateResponse, event: Event) -> None:
    """Write the event into an empty message."""
    message.index = event.index
    if isinstance(event, Tokens):
        _fill_chunk(message.tokens, event)
    elif isinstance(event, Started):
        message.started.CopyFrom(_started(event))
    else:
        message.finished.CopyFrom(_finished(event))


def once_response(choices: Sequence[Choice], *, return_tokens: bool) -> pb.GenerateOnceResponse:
    """The whole generations as they go to the client."""
    answer = pb.GenerateOnceResponse()
    for choice in choices:
        finished = _finished(choice.finished)
        message = answer.choices.add(
            index=choice.finished.index,
            started=_started(choice.started),
            text=choice.text,
            finished=finished,
        )
        for token in choice.tokens if return_tokens else ():
            _fill_token(message.tokens.add(), token)
        answer.usage.prompt_tokens += finished.usage.prompt_tokens
        answer.usage.output_tokens += finished.usage.output_tokens
        answer.usage.cached_tokens += finished.usage.cached_tokens
    return answer


def model_message(config: GatewayConfig, engine: EngineDescription) -> model_pb2.Model:
    """The served model as clients see it."""
    defaults = default_sampling(config, engine)
    return model_pb2.Model(
        name=config.model_name,
        architecture=engine.architecture,
        quantization=engine.quantization,
        compute_dtype=engine.compute_dtype,
        vocab_size=engine.vocab_size,
        max_sequence_tokens=engine.max_sequence_tokens,
        eos_token_ids=engine.eos_token_ids,
        has_chat_template=engine.has_chat_template,
        drafter=engine.drafter,
        max_draft_len=engine.max_draft_len,
        max_batch_rows=engine.max_batch_rows,
        defaults=model_pb2.GenerationDefaults(
            max_tokens=defaults.max_tokens,
            sampling=pb.SamplingParameters(
                **{name: getattr(defaults, name) for name in _DEFAULTED}
            ),
        ),
        limits=model_pb2.GenerationLimits(
            max_output_tokens=config.max_output_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            max_prompt_bytes=config.max_prompt_bytes,
            max_messages=config.max_messages,
            max_choices=config.max_choices,
        ),
    )


def replica_message(replica: Replica) -> admin_pb2.Replica:
    """A replica as operators see it."""
    return admin_pb2.Replica(
        address=replica.target,
        state=_REPLICA_STATES[replica.state],
        reason=replica.reason if replica.engine is None else "",
        generations=replica.generations,
        outstanding_tokens=replica.load.tokens,
        ejections=replica.ejections,
        resumes=replica.resumes,
        model=replica.engine.name if replica.engine is not None else "",
    )


def _sampling(request: pb.GenerateRequest) -> Mapping[str, Any]:
    # The fields of SamplingParameters are named as those of SamplingParams.
    given: dict[str, Any] = {field.name: value for field, value in request.sampling.ListFields()}
    given["stop_token_ids"] = tuple(request.sampling.stop_token_ids)
    given["verification"] = _verification(request.sampling.verification)
    if request.HasField("max_draft_len"):
        given["max_draft_len"] = request.max_draft_len
    return given | {"return_drafts": request.return_drafts}


def _verification(number: int) -> Verification | None:
    if number not in _VERIFICATIONS:
        raise invalid_argument("sampling.verification", number, ", ".join(pb.Verification.keys()))
    return _VERIFICATIONS[number]


def _priority(number: int) -> Priority:
    if number not in _PRIORITIES:
        raise invalid_argument("priority", number, ", ".join(pb.Priority.keys()))
    return _PRIORITIES[number]


def _started(event: Started) -> pb.GenerationStarted:
    return pb.GenerationStarted(
        request_id=event.request_id,
        model=event.model,
        prompt_tokens=event.prompt.prompt_tokens,
        cached_tokens=event.prompt.cached_tokens,
        queue_us=event.prompt.queue_us,
        prefill_us=event.prompt.prefill_us,
        prompt_text=event.prompt_text,
    )


def _fill_chunk(chunk: pb.TokenChunk, event: Tokens) -> None:
    """In place: a message that is put into another is written to bytes and read again."""
    chunk.SetInParent()  # It counts, even if nothing is in it.
    chunk.text = event.text
    for token in event.tokens:
        _fill_token(chunk.tokens.add(), token)
    # Open enum: a reason that this version does not know passes through.
    chunk.gate_reason = pb.GateReason.ValueType(event.gate_reason)
    chunk.batch_rows = event.batch_rows
    for index, step in enumerate(event.verify_steps):
        message = chunk.verify_steps.add(
            drafted=step.drafted,
            accepted=step.accepted,
            draft_source=DRAFT_SOURCES[step.source],
        )
        texts = event.draft_texts[index] if event.draft_texts else [None] * len(step.drafts)
        for draft, text in zip(step.drafts, texts, strict=True):
            message.drafts.add(id=draft, text=text)


def _fill_token(message: pb.Token, token: Token) -> None:
    message.id = token.id
    message.source = pb.TOKEN_SOURCE_DRAFT if token.drafted else pb.TOKEN_SOURCE_TARGET
    if token.text is not None:
        message.text = token.text
    if token.logprob is not None:
        message.logprob = token.logprob
    for each in token.alternatives:
        message.alternatives.add(id=each.id, logprob=each.logprob)


def _finished(event: Finished) -> pb.GenerationFinished:
    report = event.report
    message = pb.GenerationFinished(
        finish_reason=_FINISH_REASONS.get(event.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
        usage=pb.Usage(
            prompt_tokens=report.totals.prompt_tokens,
            output_tokens=report.totals.output_tokens,
            cached_tokens=report.cached_tokens if report.told is None else None,
        ),
        speculation=_speculation(report),
        resumes=report.resumes,
    )
    if event.stop_string is not None:
        message.stop_string = event.stop_string
    elif event.end_token is not None and event.finish_reason == FinishReason.EOS:
        message.eos_token_id = event.end_token
    elif event.end_token is not None:
        message.stop_token_id = event.end_token
    return message


def _speculation(report: GenerationReport) -> pb.Speculation | None:
    totals = report.totals
    if totals.accepted_tokens is None:
        return None
    return pb.Speculation(
        verify_steps=totals.verify_steps,
        drafted_tokens=totals.drafted_tokens,
        accepted_tokens=totals.accepted_tokens,
        derived=totals.derived,
        acceptance_rate=report.acceptance_rate,
        mean_acceptance_length=report.mean_acceptance_length,
    )
