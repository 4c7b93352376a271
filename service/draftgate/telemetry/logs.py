"""The gateway's own logs: one JSON object a line for machines, and a record of every call.

Records of calls and generations are INFO, or WARNING where the fault is the server's. No prompt,
output or credential is in any of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from opentelemetry import trace
from pythonjsonlogger.json import JsonFormatter

from draftgate.telemetry.codes import SERVER_ERRORS
from draftgate.telemetry.report import GenerationReport

__all__ = ["JsonLines", "log_call", "log_generation"]

_log = logging.getLogger("draftgate.calls")


class JsonLines(JsonFormatter):
    """A log record as one JSON object: `time` (UTC), `level`, `logger`, `message`, `pid`, the ids
    of the trace if there is one, and what the record says beside its message."""

    def __init__(self) -> None:
        super().__init__(
            ["levelname", "name", "message", "process"],
            rename_fields={
                "levelname": "level",
                "name": "logger",
                "process": "pid",
                "exc_info": "exception",
            },
            json_ensure_ascii=False,
        )

    def add_fields(
        self,
        log_data: dict[str, Any],
        record: logging.LogRecord,
        message_dict: dict[str, Any],
    ) -> None:
        moment = datetime.fromtimestamp(record.created, UTC)
        log_data["time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        super().add_fields(log_data, record, message_dict)
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            log_data["trace_id"] = trace.format_trace_id(context.trace_id)
            log_data["span_id"] = trace.format_span_id(context.span_id)


def log_call(
    method: str, code: str, began_s: float, *, tenant: str, refusal: str = "", reason: str = ""
) -> None:
    """Record a call that is over. began_s: of `time.monotonic`. tenant: empty if it is not known.
    refusal: the limit that turned it away, if one did. reason: why credentials were turned away;
    fit for the log, as it is for the caller."""
    level = _level(code)
    if not _log.isEnabledFor(level):
        return
    took_ms = _ms_since(began_s)
    said = {"method": method, "code": code, "duration_ms": took_ms, "tenant": tenant}
    said |= {"refusal": refusal, "reason": reason}
    why = f": {reason}" if reason else ""
    _log.log(level, "%s: %s in %.1f ms%s", method, code, took_ms, why, extra=_known(said))


def log_generation(
    request_id: str, code: str, began_s: float, report: GenerationReport, *, tenant: str
) -> None:
    """Record a generation that is over, and what speculation did for it."""
    level = _level(code)
    if not _log.isEnabledFor(level):
        return
    took_ms = _ms_since(began_s)
    totals = report.totals
    said = {
        "request_id": request_id,
        "tenant": tenant,
        "code": code,
        "duration_ms": took_ms,
        "finish_reason": report.finish_reason,
        "prompt_tokens": totals.prompt_tokens,
        "output_tokens": totals.output_tokens,
        "drafted_tokens": totals.drafted_tokens,
        "accepted_tokens": totals.accepted_tokens,
        "verify_steps": totals.verify_steps,
        "resumes": report.resumes,
    }
    _log.log(
        level,
        "generation %s: %s, %s tokens in %.1f ms",
        request_id,
        code,
        totals.output_tokens,
        took_ms,
        extra=_known(said),
    )


def _known(said: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in said.items() if value not in (None, "")}


def _level(code: str) -> int:
    return logging.WARNING if code in SERVER_ERRORS else logging.INFO


def _ms_since(began_s: float) -> float:
    return round((time.monotonic() - began_s) * 1000, 1)
