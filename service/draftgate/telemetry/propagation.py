"""The caller's trace context and baggage, as they go along with a call."""

from __future__ import annotations

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["outgoing_metadata"]

_W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """`traceparent`, `tracestate` and `baggage` of the current OpenTelemetry context, as far as it
    has them."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())
