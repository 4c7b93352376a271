"""Runs generations: domain request in, domain events out. Knows no protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from draftgate.contract import FinishReason, GateReason
from draftgate.errors import DraftgateError, ErrorCode, deadline_passed, shutting_down
from draftgate.gateway.activity import Activity
from draftgate.gateway.admission import Place
from draftgate.gateway.admission.asking import ask_for
from draftgate.gateway.events import Event, Finished, Started, Token, Tokens
from draftgate.gateway.field_names import in_callers_words
from draftgate.gateway.prompts import prompt_text
from draftgate.gateway.team import Admits
from draftgate.gateway.tenant import ANONYMOUS, current_tenant
from draftgate.gateway.token_text import TokenTexts
from draftgate.gateway.validate import GenerationCall
from draftgate.telemetry.codes import OK
from draftgate.telemetry.logs import log_generation
from draftgate.telemetry.report import GenerationReport
from draftgate.telemetry.spans import InferenceSpan, InferenceStart, note_tenant, note_wait
from draftgate.telemetry.tracing import Tracing
from draftgate.text import StopStrings, Tokenizer
from draftgate.upstream.replicas import ReplicaSet
from draftgate.upstream.resume import ResumeLimits, ResumingGeneration
from draftgate.upstream.types import (
    ChatPrompt,
    Chunk,
    GenerationRequest,
    PromptReport,
    TokenPrompt,
    VerifyStep,
)

__all__ = ["GenerationCore", "Running"]

# Ends that the caller did not ask for are the status of the call too.
_FAILED_ENDS: Mapping[str, Callable[[], DraftgateError]] = {
    FinishReason.DEADLINE: deadline_passed,
    FinishReason.CANCELLED: lambda: DraftgateError(
        ErrorCode.CANCELLED, "the generation was stopped"
    ),
}

_NO_PROMPT_REPORT = PromptReport(
    prompt_tokens=None, cached_tokens=None, queue_us=None, prefill_us=None
)


class Running:
    """A generation that runs: an asynchronous iterable of its events, and the way to end it."""

    def __init__(self, events: AsyncIterator[Event], end: Callable[[DraftgateError], bool]) -> None:
        self._events = events
        self._end = end

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    def end(self, error: DraftgateError) -> bool:
        """Fail it now: the events go on with a `Finished` that says what was done, if anything was,
        and then raise `error`. False, and without effect, if there is nothing to end yet."""
        return self._end(error)


class GenerationCore:
    """All generations of one gateway."""

    def __init__(
        self,
        replicas: ReplicaSet,
        tracing: Tracing,
        admission: Admits,
        *,
        model_name: str,
        tokenizer: Tokenizer | None,
        resume: ResumeLimits,
    ) -> None:
        self._replicas = replicas
        self._tracing = tracing
        self._admission = admission
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._resume = resume
        self._running: dict[str, ResumingGeneration] = {}
        self._activity = Activity()
        self._draining = False

    @asynccontextmanager
    async def run(self, call: GenerationCall) -> AsyncIterator[Running]:
        """The events of one generation, to be used as `async with core.run(call) as events`.

        Waits for a place if the server is full. Leaving early frees the engine's row. A replica
        that is lost is not the generation's end: it goes on elsewhere. Iterating raises
        DraftgateError for whatever ended the generation, after a `Finished` with what was done if
        there was anything. Raises DraftgateError: UNAVAILABLE while draining, and what
        `Admission.admitted` raises.
        """
        ask = ask_for(call.request, current_tenant(), call.priority)
        async with self._admission.admitted(ask) as place:
            if ask.tenant is not ANONYMOUS:
                note_tenant(ask.tenant.name)
            if place.waited_s:
                note_wait(ask.priority, place.waited_s)
            with self._activity.one():
                async with self._run(_with_time_left(call, place.waited_s), place) as running:
                    yield running

    @asynccontextmanager
    async def _run(self, call: GenerationCall, place: Place) -> AsyncIterator[Running]:
        request = call.request
        if self._draining:
            raise shutting_down()
        generation = ResumingGeneration(
            self._replicas, request, tokenizer=self._tokenizer, limits=self._resume
        )
        span = InferenceSpan(self._tracing.tracer, self._span_start(request))
        report = GenerationReport()
        deadline_s = _deadline_s(request)
        began_s = time.monotonic()
        code: str = ErrorCode.INTERNAL
        self._running[request.request_id] = generation

        def end(error: DraftgateError) -> bool:
            generation.abandon(error)
            return True

        try:
            async with (
                generation.started(span.metadata(), span.sent),
                aclosing(self._events(call, generation, span, report)) as events,
            ):
                yield Running(events, end)
            code = OK
        except DraftgateError as error:
            code = error.code
            raise
        except asyncio.CancelledError:
            passed = deadline_s is not None and asyncio.get_running_loop().time() >= deadline_s
            code = ErrorCode.DEADLINE_EXCEEDED if passed else ErrorCode.CANCELLED
            raise
        finally:
            report.resumes = generation.resumes
            span.end(code, report)
            tenant = current_tenant().name
            log_generation(request.request_id, code, began_s, report, tenant=tenant)
            if report.prompt_tokens:
                place.used_tokens = report.prompt_tokens + report.output_tokens
            del self._running[request.request_id]

    @property
    def running(self) -> int:
        """How many generations run."""
        return len(self._running)

    def drain(self) -> None:
        """Take no new generations from now on."""
        self._draining = True
        self._admission.close()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait for the running generations to end; False if some still run then."""
        return await self._activity.wait_idle(timeout_s)

    def cut(self) -> None:
        """End what still runs with UNAVAILABLE."""
        for generation in self._running.values():
            generation.abandon(
                DraftgateError(ErrorCode.UNAVAILABLE, "the server shut down during the generation")
            )

    def _span_start(self, request: GenerationRequest) -> InferenceStart:
        return InferenceStart(
            operation="chat" if isinstance(request.prompt, ChatPrompt) else "text_completion",
            model=self._model_name,
            request_id=request.request_id,
            sampling=request.sampling,
        )

    async def _events(
        self,
        call: GenerationCall,
        generation: ResumingGeneration,
        span: InferenceSpan,
        report: GenerationReport,
    ) -> AsyncGenerator[Event, None]:
        texts = self._token_texts(call)
        stops = StopStrings(call.stop)
        end_token: int | None = None
        failure: DraftgateError | None = None
        started = False
        try:
            async for chunk in generation:
                span.chunk()
                _count(report, chunk)
                text = stops.push(chunk.text)
                if stops.matched is not None:
                    report.finish_reason = FinishReason.STOP_STRING
                    # Before anything is written: a reader that lags keeps no row of the engine.
                    generation.abandon(DraftgateError(ErrorCode.CANCELLED, "a stop string came"))
                elif chunk.finish_reason:
                    text += stops.flush()
                    end_token = _end_token(chunk, call)
                if not started:
                    yield await self._started(call, chunk)
                    started = True
                if chunk.token_ids or text:
                    yield _tokens(chunk, text, texts, call.index)
                if stops.matched is not None:
                    break
        except DraftgateError as error:
            failure = in_callers_words(error, call.request)
        else:
            if report.finish_reason in _FAILED_ENDS:
                failure = _FAILED_ENDS[report.finish_reason]()
        report.resumes = generation.resumes
        if held := stops.flush():  # It failed: this is text all the same.
            yield _only_text(held, call.index)
        if started:
            yield Finished(
                report.finish_reason, report, stops.matched, end_token=end_token, index=call.index
            )
        if failure is not None:
            raise failure

    async def _started(self, call: GenerationCall, chunk: Chunk) -> Started:
        request = call.request
        text = None
        if call.echo:
            text = await prompt_text(self._tokenizer, request.prompt, request.resume_len)
        return Started(
            request.request_id,
            self._model_name,
            chunk.prompt or _NO_PROMPT_REPORT,
            prompt_text=text,
            index=call.index,
        )

    def _token_texts(self, call: GenerationCall) -> TokenTexts | None:
        if not call.return_token_text or self._tokenizer is None:
            return None
        request = call.request
        ids = request.prompt.ids if isinstance(request.prompt, TokenPrompt) else ()
        return TokenTexts(self._tokenizer, ids[len(ids) - request.resume_len :])


def _with_time_left(call: GenerationCall, waited_s: float) -> GenerationCall:
    """The call with what its wait has left of its deadline."""
    deadline_ms = call.request.deadline_ms
    if deadline_ms is None:
        return call
    left_ms = max(1, deadline_ms - int(waited_s * 1000))
    return replace(call, request=replace(call.request, deadline_ms=left_ms))


def _deadline_s(request: GenerationRequest) -> float | None:
    if request.deadline_ms is None:
        return None
    return asyncio.get_running_loop().time() + request.deadline_ms / 1000


def _count(report: GenerationReport, chunk: Chunk) -> None:
    if chunk.prompt is not None:
        report.prompt_tokens = chunk.prompt.prompt_tokens or 0
        report.cached_tokens = chunk.prompt.cached_tokens or 0
    report.told = chunk.totals
    report.output_tokens += len(chunk.token_ids)
    report.finish_reason = chunk.finish_reason
    for step in chunk.steps:
        report.add_step(step.drafted, step.accepted)


def _end_token(chunk: Chunk, call: GenerationCall) -> int | None:
    """The token that ended the generation, if it was one and is the last that was emitted."""
    enders: Sequence[int] = ()
    if chunk.finish_reason == FinishReason.EOS:
        enders = call.eos_token_ids
    elif chunk.finish_reason == FinishReason.STOP_TOKEN:
        enders = call.request.sampling.stop_token_ids
    last = chunk.token_ids[-1] if chunk.token_ids else None
    return last if last in enders else None


def _only_text(text: str, choice: int) -> Tokens:
    return Tokens(text, (), (), (), gate_reason=GateReason.UNKNOWN, batch_rows=0, index=choice)


def _tokens(chunk: Chunk, text: str, texts: TokenTexts | None, choice: int) -> Tokens:
    draft_texts = _draft_texts(chunk, texts) if texts else ()  # While they have not moved on.
    drafted = _drafted_flags(len(chunk.token_ids), chunk.steps)
    if texts or chunk.logprobs or chunk.alternatives:
        tokens = _told_tokens(chunk, drafted, texts)
    else:
        tokens = tuple(map(Token, chunk.token_ids, drafted))
    return Tokens(
        text=text,
        tokens=tokens,
        verify_steps=tuple([step for step in chunk.steps if step.drafted]),
        draft_texts=draft_texts,
        gate_reason=chunk.gate_reason,
        batch_rows=chunk.batch_rows,
        index=choice,
    )


def _told_tokens(
    chunk: Chunk, drafted: Sequence[bool], texts: TokenTexts | None
) -> tuple[Token, ...]:
    """The tokens with what else was asked for."""
    none: Sequence[None] = [None] * len(chunk.token_ids)
    return tuple(
        map(
            Token,
            chunk.token_ids,
            drafted,
            texts.tokens(chunk.token_ids, last=bool(chunk.finish_reason)) if texts else none,
            chunk.logprobs or none,
            chunk.alternatives or [()] * len(chunk.token_ids),
        )
    )


def _draft_texts(chunk: Chunk, texts: TokenTexts) -> tuple[tuple[str, ...], ...]:
    found = []
    start = 0
    for step in chunk.steps:
        if step.drafted:
            found.append(texts.drafts(step.drafts, before=chunk.token_ids[:start]))
        start += step.accepted + 1
    return tuple(found)


def _drafted_flags(tokens: int, steps: Sequence[VerifyStep]) -> list[bool]:
    """For each token whether it was drafted: a step emits what was accepted, then the target's."""
    if not steps:
        return [False] * tokens
    flags: list[bool] = []
    for step in steps:
        flags += [True] * step.accepted + [False]
    flags = flags[:tokens]  # The end of the generation may cut the last step's own token.
    return flags + [False] * (tokens - len(flags))
