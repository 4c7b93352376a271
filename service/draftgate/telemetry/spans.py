"""The spans of a request: a SERVER span for the call, and under it a CLIENT span for the inference.

Spans are ended explicitly, once, with the status of the call. Nothing here holds prompt or output
text. Where a request is not sampled, no attribute is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from draftgate.sampling import SamplingParams
from draftgate.telemetry import attributes as names
from draftgate.telemetry.codes import OK, SERVER_ERRORS
from draftgate.telemetry.report import GenerationReport

__all__ = [
    "InferenceSpan",
    "InferenceStart",
    "PassedSpan",
    "ServerSpan",
    "note_tenant",
    "note_wait",
]

_W3C = TraceContextTextMapPropagator()


class ServerSpan:
    """The span of one call to the gateway."""

    def __init__(
        self, tracer: trace.Tracer, method: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> None:
        """`method` is `package.Service/Method`; `metadata` may carry the caller's trace context."""
        carrier = {key: value for key, value in metadata if isinstance(value, str)}
        self._span = tracer.start_span(
            method,
            context=_W3C.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method},
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make it the parent of spans started inside. Not to be held across a generator's yield."""
        with trace.use_span(
            self._span,
            end_on_exit=False,
            record_exception=False,
            set_status_on_exception=False,
        ):
            yield

    def end(self, code: str, refusal: str = "") -> None:
        """End with the name of the call's status, and of the limit that turned it away, if any."""
        if refusal:
            self._span.set_attribute(names.ADMISSION_REFUSAL, refusal)
        self._span.set_attribute(names.RPC_STATUS_CODE, code)
        _end(self._span, code, is_error=code in SERVER_ERRORS)


def note_tenant(tenant: str) -> None:
    """Note on the active span for whom the call is made."""
    trace.get_current_span().set_attribute(names.TENANT, tenant)


def note_wait(priority: str, waited_s: float) -> None:
    """Note on the active span that the request had to wait for its start, and how long."""
    trace.get_current_span().set_attributes(_wait_attributes(priority, waited_s))


@dataclass(frozen=True)
class InferenceStart:
    """What is known when an inference starts."""

    operation: str
    """`chat` or `text_completion`."""
    model: str
    request_id: str
    sampling: SamplingParams


class InferenceSpan:
    """The span of one generation at the model server."""

    def __init__(self, tracer: trace.Tracer, start: InferenceStart) -> None:
        """The active span becomes its parent."""
        self._start_s = time.monotonic()
        self._first_chunk_s: float | None = None
        self._model = start.model
        self._span = tracer.start_span(
            f"{start.operation} {start.model}", kind=trace.SpanKind.CLIENT
        )
        if self._span.is_recording():
            self._span.set_attributes(_start_attributes(start))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The trace context for the model server; empty unless the request is sampled.

        Triton records whatever comes with a context and ignores its sampled bit.
        """
        return _metadata(self._span)

    def sent(self, upstream_request_id: str, server: str) -> None:
        """It goes to the model server at this address, host:port; once more if that one is
        lost."""
        if self._span.is_recording():
            self._span.set_attributes(_upstream_attributes(upstream_request_id, server))

    def chunk(self) -> None:
        """A chunk came."""
        if self._first_chunk_s is None:
            self._first_chunk_s = time.monotonic() - self._start_s

    def end(self, code: str, report: GenerationReport) -> None:
        """End with the name of the generation's status and what was done up to then."""
        if self._span.is_recording():
            self._span.set_attributes(_end_attributes(report))
            if self._first_chunk_s is not None:
                self._span.set_attributes(
                    _known(
                        {
                            names.GEN_AI_USAGE_INPUT_TOKENS: report.totals.prompt_tokens,
                            names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: (
                                report.cached_tokens if report.told is None else None
                            ),
                            names.GEN_AI_RESPONSE_MODEL: self._model,
                            names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: self._first_chunk_s,
                        }
                    )
                )
        _end(self._span, code, is_error=code != OK)


class PassedSpan:
    """The span of one request that is passed on to the model server as it is, from its arrival."""

    def __init__(self, tracer: trace.Tracer, model: str, request_id: str) -> None:
        """The active span becomes its parent. request_id: the client's; may be empty."""
        self._responses = 0
        self._failure: str | None = None
        self._span = tracer.start_span(f"infer {_shown(model)}", kind=trace.SpanKind.CLIENT)
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    names.GEN_AI_REQUEST_MODEL: _shown(model),
                    names.GEN_AI_RESPONSE_ID: _shown(request_id),
                }
            )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The trace context for the model server; empty unless the request is sampled."""
        return _metadata(self._span)

    def waited(self, priority: str, waited_s: float) -> None:
        """It had to wait for its start."""
        self._span.set_attributes(_wait_attributes(priority, waited_s))

    def sent(self, upstream_request_id: str, server: str) -> None:
        """It goes to the model server at this address, host:port; once more if that one is
        lost."""
        if self._span.is_recording():
            self._span.set_attributes(_upstream_attributes(_shown(upstream_request_id), server))

    def response(self) -> None:
        """A response came."""
        self._responses += 1

    def failed(self, code: str) -> None:
        """A response said that the request failed."""
        self._failure = code

    def end(self, code: str, refusal: str = "") -> None:
        """End with the name of the call's status, or what a response told before, and of the limit
        that turned it away, if any."""
        code = self._failure or code
        if refusal:
            self._span.set_attribute(names.ADMISSION_REFUSAL, refusal)
        self._span.set_attribute(names.RESPONSES, self._responses)
        _end(self._span, code, is_error=code != OK)


def _metadata(span: trace.Span) -> tuple[tuple[str, str], ...]:
    if not span.get_span_context().trace_flags.sampled:
        return ()
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    return tuple(carrier.items())


def _shown(text: str) -> str:
    """What a client calls something, kept short."""
    return text if len(text) <= 128 else text[:125] + "..."


def _wait_attributes(priority: str, waited_s: float) -> Mapping[str, AttributeValue]:
    return {names.ADMISSION_PRIORITY: priority, names.ADMISSION_WAIT_S: waited_s}


def _upstream_attributes(request_id: str, server: str) -> dict[str, AttributeValue]:
    address, _, port = server.rpartition(":")
    found: dict[str, AttributeValue] = {
        names.UPSTREAM_REQUEST_ID: request_id,
        names.SERVER_ADDRESS: address,
    }
    if port.isdecimal():
        found[names.SERVER_PORT] = int(port)
    return found


def _end(span: trace.Span, code: str, *, is_error: bool) -> None:
    if is_error:
        span.set_attribute(names.ERROR_TYPE, code)
        span.set_status(trace.StatusCode.ERROR)
    span.end()


def _start_attributes(start: InferenceStart) -> Mapping[str, AttributeValue]:
    sampling = start.sampling
    found: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION_NAME: start.operation,
        names.GEN_AI_PROVIDER_NAME: "draftgate",
        names.GEN_AI_REQUEST_MODEL: start.model,
        names.GEN_AI_REQUEST_STREAM: True,
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
        names.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.GEN_AI_RESPONSE_ID: start.request_id,
    }
    # Attribute integers are signed 64-bit; a larger seed would make the whole export fail.
    if sampling.seed is not None and sampling.seed < 2**63:
        found[names.GEN_AI_REQUEST_SEED] = sampling.seed
    return found


def _end_attributes(report: GenerationReport) -> Mapping[str, AttributeValue]:
    totals = report.totals
    return _known(
        {
            names.GEN_AI_USAGE_OUTPUT_TOKENS: totals.output_tokens,
            names.SPEC_NUM_SPEC_STEPS: totals.verify_steps,
            names.SPEC_NUM_DRAFT_TOKENS: totals.drafted_tokens,
            names.SPEC_NUM_ACCEPTED_DRAFT_TOKENS: totals.accepted_tokens,
            names.SPEC_DERIVED: totals.derived or None,
            names.UPSTREAM_RESUMES: report.resumes or None,
            names.SPEC_ACCEPTANCE_HISTOGRAM: (
                tuple(report.histogram) if report.told is None else None
            ),
            names.GEN_AI_RESPONSE_FINISH_REASONS: (
                (report.finish_reason,) if report.finish_reason else None
            ),
            names.SPEC_DRAFT_ACCEPTANCE_RATE: report.acceptance_rate,
            names.SPEC_MEAN_ACCEPTANCE_LENGTH: report.mean_acceptance_length,
        }
    )


def _known(values: Mapping[str, AttributeValue | None]) -> Mapping[str, AttributeValue]:
    """Without what is None: an attribute that is not there is not known."""
    return {name: value for name, value in values.items() if value is not None}
