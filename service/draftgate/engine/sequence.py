"""One generation inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from draftgate.contract import FinishReason
from draftgate.engine.request import Request, Sink
from draftgate.engine.sampler import RowSampler

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """A request with its tokens and where it stands."""

    row_id: int
    """Unique in the engine's life; also the order of arrival."""
    request: Request
    sink: Sink
    make_sampler: Callable[[], RowSampler]
    arrived_s: float
    """When it was submitted, on the engine's clock."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and output so far."""
    slot: int | None = None
    """Its slot in the KV cache while it runs."""
    computed: int = 0
    """How many of its tokens have keys and values in the cache."""
    prefill_upto: int = 0
    """Tokens to compute before it decodes: the prompt, or after preemption all it had."""
    started_s: float | None = None
    """When it first got a slot."""
    first_token_s: float | None = None
    chunks: int = 0
    """Outputs sent."""
    cancelled: bool = False

    @cached_property
    def sampler(self) -> RowSampler:
        """How it picks tokens; made when it is first needed, by the thread that computes."""
        return self.make_sampler()

    @property
    def prompt_len(self) -> int:
        return len(self.request.input_ids) - self.request.resume_len

    @property
    def output_len(self) -> int:
        """Tokens emitted, those of an earlier run included."""
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Whether only its last token is not computed yet."""
        return self.computed >= self.prefill_upto

    @property
    def budget(self) -> int:
        """How many more tokens it may emit."""
        return self.request.params.max_tokens - self.output_len

    def expired(self, now_s: float) -> bool:
        deadline_ms = self.request.deadline_ms
        return deadline_ms is not None and now_s >= self.arrived_s + deadline_ms / 1000

    def ended_by(self, token: int, eos_token_ids: tuple[int, ...]) -> FinishReason:
        """Why emitting this token ends the generation, if it does; length not considered."""
        params = self.request.params
        if token in params.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if token in eos_token_ids and not params.ignore_eos:
            return FinishReason.EOS
        return FinishReason.NONE
