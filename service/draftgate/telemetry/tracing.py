"""One tracer provider, its exporter, and its bounded end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from draftgate import __version__

__all__ = ["Tracing", "configured_endpoint"]

_log = logging.getLogger(__name__)

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def configured_endpoint(endpoint: str | None) -> str | None:
    """`endpoint`, or else what the environment names; with a scheme, or None for no tracing."""
    found = endpoint or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), None)
    if found and "://" not in found:
        return f"http://{found}"
    return found or None


class Tracing:
    """Makes spans and exports them; without an endpoint only hands trace contexts on."""

    def __init__(self, *, endpoint: str | None, sample_ratio: float = 1.0) -> None:
        self._provider: TracerProvider | None = None
        provider: trace.TracerProvider = trace.NoOpTracerProvider()
        if endpoint is not None:
            self._provider = provider = TracerProvider(
                sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
                resource=Resource.create(
                    {"service.name": "draftgate", "service.version": __version__}
                ),
                # The gateway shuts it down itself, within a bound.
                shutdown_on_exit=False,
            )
            self._provider.add_span_processor(
                BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
            )
        self.tracer = provider.get_tracer("draftgate", __version__)

    async def shutdown(self, timeout_s: float) -> None:
        """Export what is left, for at most `timeout_s`: the collector may be gone."""
        if self._provider is None:
            return
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        provider, self._provider = self._provider, None

        def flush() -> None:
            provider.shutdown()
            with suppress(RuntimeError):  # The loop may be over by then.
                loop.call_soon_threadsafe(done.set)

        # A daemon: an exporter that still retries must not hold up the end of the process.
        threading.Thread(target=flush, name="flush-spans", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            _log.warning("the last spans were not exported within %g s", timeout_s)
