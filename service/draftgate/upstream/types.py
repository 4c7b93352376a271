"""What the gateway asks of the engine and what it gets back, free of wire formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from draftgate.contract import DraftSource
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from draftgate.text import Message
from draftgate.totals import Totals

__all__ = [
    "ChatPrompt",
    "Chunk",
    "EngineCounters",
    "EngineDescription",
    "GenerationRequest",
    "Prompt",
    "PromptReport",
    "TextPrompt",
    "TokenAlternative",
    "TokenPrompt",
    "VerifyStep",
]


@dataclass(frozen=True)
class TextPrompt:
    """A raw prompt, tokenised as it stands."""

    tensor: ClassVar[str] = "text_input"
    text: str


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, put through the model's chat template."""

    tensor: ClassVar[str] = "messages"
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class TokenPrompt:
    """Token ids, used as they stand."""

    tensor: ClassVar[str] = "input_ids"
    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class GenerationRequest:
    """One generation, already validated."""

    request_id: str
    """The caller's id; the id on the wire to Triton starts with it and is unique."""
    prompt: Prompt
    sampling: SamplingParams
    resume_len: int = 0
    """How many trailing ids of a TokenPrompt this generation already emitted elsewhere."""
    deadline_ms: int | None = None
    """Milliseconds left for the whole generation; None has no limit."""
    at_once: bool = False
    """Whether every chunk is wanted as soon as it comes, because the caller looks in it for what
    ends the generation."""


class VerifyStep(NamedTuple):
    """One engine step of a request: what was drafted and how much of it the target accepted."""

    drafted: int
    accepted: int
    source: DraftSource
    drafts: tuple[int, ...] = ()
    """The drafted ids, if they were asked for."""


class TokenAlternative(NamedTuple):
    """A likely token at some position."""

    id: int
    logprob: float


@dataclass(frozen=True)
class PromptReport:
    """What the first chunk says about the prompt. None: the engine does not say."""

    prompt_tokens: int | None
    cached_tokens: int | None
    queue_us: int | None
    prefill_us: int | None


@dataclass(slots=True)  # Not frozen: that would make the one object of every message dearer.
class Chunk:
    """The new tokens of one engine step, or of several that were made one."""

    index: int
    """0, 1, 2, ... within the generation, on one replica; of several steps the first one's."""
    text: str
    token_ids: tuple[int, ...]
    steps: tuple[VerifyStep, ...]
    """The verify steps behind the tokens; steps that drafted nothing may be among them."""
    gate_reason: int
    """A contract.GateReason; numbers that this version does not know pass through. Of several
    steps this and the next are the last one's."""
    batch_rows: int
    finish_reason: str
    """A contract.FinishReason, empty until the last chunk; others pass through."""
    logprobs: tuple[float, ...] = ()
    """One per token, if they were asked for."""
    alternatives: tuple[tuple[TokenAlternative, ...], ...] = ()
    """One tuple per token, if they were asked for."""
    prompt: PromptReport | None = None
    """On the first chunk only."""
    totals: Totals | None = None
    """From an engine that tells neither the ids of its tokens nor its steps; None where `token_ids`
    and `steps` say it all."""
    size_bytes: int = 0
    """What its tensors took on the wire."""


@dataclass(frozen=True)
class EngineDescription:
    """What the engine serves. Empty or None: it does not say."""

    name: str
    architecture: str
    quantization: str
    compute_dtype: str
    vocab_size: int | None
    max_sequence_tokens: int | None
    """Longest prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    drafter: str
    """Empty when the engine does not speculate."""
    max_draft_len: int | None
    max_batch_rows: int | None
    kv_total_tokens: int = 0
    """What the KV cache holds, all rows together; 0 if the engine does not say."""
    lacks_tokenizer: bool = False
    """Messages could be made a prompt, if only the gateway had the model's tokenizer."""

    @property
    def vocab_limit(self) -> int:
        """One more than the largest id that a request may hold."""
        return _INT32_MAX if self.vocab_size is None else self.vocab_size

    @property
    def sequence_limit(self) -> int:
        """Most tokens that a request may ask for, its prompt included."""
        return _INT32_MAX if self.max_sequence_tokens is None else self.max_sequence_tokens

    @classmethod
    def from_json(cls, text: str) -> EngineDescription:
        """Raises DraftgateError(INTERNAL) for text that is not a description."""
        fields = _Fields(text, "describe")
        return cls(
            name=fields.text("name"),
            architecture=fields.text("architecture"),
            quantization=fields.text("quantization"),
            compute_dtype=fields.text("compute_dtype"),
            vocab_size=fields.integer("vocab_size"),
            max_sequence_tokens=fields.integer("max_sequence_tokens"),
            eos_token_ids=fields.integers("eos_token_ids"),
            has_chat_template=fields.flag("has_chat_template"),
            drafter=fields.text("drafter"),
            max_draft_len=fields.integer("max_draft_len"),
            max_batch_rows=fields.integer("max_batch_rows"),
            kv_total_tokens=fields.integer("kv_total_tokens", 0),
        )


@dataclass(frozen=True)
class EngineCounters:
    """The engine's running totals and present state."""

    running_rows: int
    waiting_rows: int
    steps: int
    rows_freed_cancelled: int
    kv_used_blocks: int
    kv_total_blocks: int
    emitted_tokens: int

    @classmethod
    def from_json(cls, text: str) -> EngineCounters:
        """Raises DraftgateError(INTERNAL) for text that is not a set of counters."""
        fields = _Fields(text, "counters")
        return cls(**{name: fields.integer(name) for name in cls.__dataclass_fields__})


class _Fields:
    """Typed reads of a JSON object that the engine sent."""

    def __init__(self, text: str, op: str) -> None:
        self._op = op
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._bad("not JSON") from error
        if not isinstance(value, dict):
            raise self._bad("not an object")
        self._values: Mapping[str, object] = value

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._bad(f"{name} is not a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            raise self._bad(f"{name} is not a boolean")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._bad(f"{name} is not an integer")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._bad(f"{name} is not a list of integers")
        return tuple(value)

    def _bad(self, problem: str) -> DraftgateError:
        return DraftgateError(
            ErrorCode.INTERNAL, f"the engine's answer to {self._op!r} is unusable: {problem}"
        )
