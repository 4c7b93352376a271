"""What a generation tells, and what is asked of one, free of protobuf.

None means: the server does not say, or nobody asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

from draftgate.contract import DraftSource, FinishReason, GateReason
from draftgate.sampling import Verification

__all__ = [
    "Choice",
    "Completion",
    "DraftToken",
    "Event",
    "Finished",
    "GenerationDefaults",
    "GenerationLimits",
    "GenerationOptions",
    "Message",
    "Model",
    "Priority",
    "Prompt",
    "ServingStatus",
    "Speculation",
    "Started",
    "Token",
    "TokenAlternative",
    "Tokens",
    "Usage",
    "VerifyStep",
]


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    """system, user or assistant."""
    content: str


Prompt = str | Sequence[Message] | Sequence[int]
"""A raw prompt, a conversation that goes through the model's chat template, or token ids."""


class Priority(StrEnum):
    """Whom a generation may keep waiting when the server is full."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    """Starts after interactive ones, but for a small share."""


class GenerationOptions(TypedDict, total=False):
    """What may be asked of a generation. What is not given is the server's to choose."""

    model: str
    request_id: str
    resume_len: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    verification: Verification
    max_draft_len: int
    return_drafts: bool
    return_token_text: bool
    n: int
    echo: bool
    priority: Priority


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt has been read and the first step is done."""

    request_id: str
    model: str
    prompt_tokens: int | None
    cached_tokens: int | None
    """Tokens of the prompt whose KV cache was reused."""
    queue_us: int | None
    """How long the request waited for a row in the batch."""
    prefill_us: int | None
    """From then to its first token."""
    prompt_text: str | None
    """With `echo`."""
    index: int = 0
    """Which of the `n` choices this is about; so in every event."""


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """A likely token at some position."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token."""

    id: int
    drafted: bool
    """Whether it was drafted and accepted; else it is the target's own."""
    text: str | None
    """The text it completed, with `return_token_text`."""
    logprob: float | None
    """Natural logarithm, under the target, with `logprobs`."""
    alternatives: tuple[TokenAlternative, ...]


@dataclass(frozen=True, slots=True)
class DraftToken:
    """A drafted token, accepted or not."""

    id: int
    text: str | None


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """One check of drafted tokens."""

    drafted: int
    accepted: int
    source: DraftSource
    """Who drafted; NONE stands for a drafter that this version does not know."""
    drafts: tuple[DraftToken, ...]
    """With `return_drafts`; the first `accepted` of them were accepted, in order."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens and new text, never what was told before."""

    text: str
    """Empty while a character is incomplete or all of it may yet become a stop string."""
    tokens: tuple[Token, ...]
    verify_steps: tuple[VerifyStep, ...]
    gate_reason: GateReason
    """Why as many tokens were drafted as were; UNKNOWN also for a reason that this version does
    not know."""
    batch_rows: int
    """Rows in the step's batch."""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts over a whole generation."""

    verify_steps: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    acceptance_rate: float | None
    """accepted / drafted; None when nothing was drafted."""
    mean_acceptance_length: float | None
    """1 + accepted / verify steps; None without a verify step."""
    derived: bool
    """The counts follow from how many tokens came at once; otherwise the engine counted them."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event, also of a generation that failed."""

    finish_reason: FinishReason
    """NONE where it did not come to an end of its own."""
    matched: str | int | None
    """What ended it: the stop string, or the id of the stop or end-of-sequence token."""
    usage: Usage
    speculation: Speculation | None
    """None where it is not known what became of drafts."""
    resumes: int
    """How often the model server was lost and the generation went on elsewhere."""
    index: int = 0


Event = Started | Tokens | Finished


@dataclass(frozen=True)
class Choice:
    """One generation as a whole, or as much of it as has come."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    started: Started | None
    """None until it has."""
    finished: Finished | None
    """None until it has."""


@dataclass(frozen=True)
class Completion:
    """All choices of one request, each with its end."""

    choices: tuple[Choice, ...]
    """By their index."""
    usage: Usage
    """Sums over the choices: the prompt counts once for each."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class GenerationDefaults:
    """What a generation gets for what it leaves out."""

    max_tokens: int
    sampling: Mapping[str, object]
    """By option of `generate`; what is not there has no default that is a value."""


@dataclass(frozen=True)
class GenerationLimits:
    """What the server takes. None is what the model can hold."""

    max_output_tokens: int | None
    """Largest `max_tokens`."""
    max_prompt_tokens: int | None
    """Text counts as one token for each four bytes of UTF-8."""
    max_prompt_bytes: int
    """The prompt, or all messages together, in UTF-8."""
    max_messages: int
    max_choices: int
    """Largest `n`."""


@dataclass(frozen=True)
class Model:
    """What is served. Empty or None is not known."""

    name: str
    architecture: str
    quantization: str
    compute_dtype: str
    vocab_size: int | None
    max_sequence_tokens: int | None
    """Longest prompt plus output."""
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    drafter: str
    """Empty when the engine does not speculate."""
    max_draft_len: int | None
    max_batch_rows: int | None
    defaults: GenerationDefaults
    limits: GenerationLimits


class ServingStatus(StrEnum):
    """What a service says of its health."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"
    """No such service, as yet."""
