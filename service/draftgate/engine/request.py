"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from draftgate.contract import DraftSource, FinishReason, GateReason
from draftgate.errors import DraftgateError, invalid_argument
from draftgate.sampling import SamplingParams, check_token_ids

__all__ = ["EngineCounters", "Output", "Request", "Sink", "VerifyStep", "check_request"]


@dataclass(frozen=True)
class Request:
    """One generation to run."""

    request_id: str
    """Unique among the requests in the engine."""
    input_ids: tuple[int, ...]
    """The prompt, followed by `resume_len` tokens that an earlier run already emitted."""
    params: SamplingParams
    """How to pick tokens and when to end."""
    resume_len: int = 0
    """How many trailing `input_ids` count as output: for penalties and `max_tokens`."""
    deadline_ms: int | None = None
    """Milliseconds from submission after which the request is dropped."""


@dataclass(frozen=True)
class VerifyStep:
    """One verification of drafted tokens."""

    draft_ids: tuple[int, ...]
    """What was drafted."""
    accepted: int
    """How many of them, from the first on, were accepted and emitted."""
    source: DraftSource
    """Who drafted them."""


@dataclass(frozen=True)
class Output:
    """What one engine step did for one request."""

    request_id: str
    """The request's id."""
    chunk_index: int
    """0, 1, 2, ... within the generation."""
    token_ids: tuple[int, ...] = ()
    """New tokens; empty only in a last output."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each under the target (natural, before temperature and penalties)."""
    top_ids: tuple[tuple[int, ...], ...] = ()
    """The most likely tokens at each position, if asked for."""
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    """Their log-probabilities."""
    verify_step: VerifyStep | None = None
    """The verification behind these tokens; None where nothing was drafted."""
    gate_reason: GateReason = GateReason.UNKNOWN
    """Why the draft length was what it was."""
    batch_rows: int = 0
    """Rows in the step."""
    finish_reason: FinishReason = FinishReason.NONE
    """Set in the last output."""
    error: DraftgateError | None = None
    """Set in the last output when the engine itself failed."""
    prompt_len: int = 0
    """Tokens in the prompt, resumed ones not counted."""
    queue_us: int = 0
    """Time the request waited for a row."""
    prefill_us: int = 0
    """Time from then to its first token."""


Sink = Callable[[Output], None]
"""Takes a request's outputs in order, on the engine's thread: it must not block."""


@dataclass(frozen=True)
class EngineCounters:
    """Totals since the engine started, and what it holds now."""

    running_rows: int = 0
    waiting_rows: int = 0
    steps: int = 0
    emitted_tokens: int = 0
    verify_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rows_freed_cancelled: int = 0
    preemptions: int = 0
    kv_used_blocks: int = 0
    kv_total_blocks: int = 0


def check_request(request: Request, vocab_size: int, max_sequence_tokens: int) -> None:
    """Raise DraftgateError(INVALID_ARGUMENT) for the first field out of range."""
    request.params.validate(vocab_size=vocab_size)
    if not request.input_ids:
        raise invalid_argument("input_ids", [], "at least one token")
    check_token_ids("input_ids", request.input_ids, vocab_size)
    if len(request.input_ids) >= max_sequence_tokens:
        raise invalid_argument(
            "input_ids",
            f"{len(request.input_ids)} tokens",
            f"at most {max_sequence_tokens - 1} tokens",
        )
    if not 0 <= request.resume_len < len(request.input_ids):
        raise invalid_argument(
            "resume_len",
            request.resume_len,
            f"an integer from 0 to {len(request.input_ids) - 1}",
        )
    if request.params.max_tokens <= request.resume_len:
        raise invalid_argument(
            "max_tokens", request.params.max_tokens, f"above resume_len = {request.resume_len}"
        )
    if request.deadline_ms is not None and request.deadline_ms <= 0:
        raise invalid_argument("deadline_ms", request.deadline_ms, "above 0")
