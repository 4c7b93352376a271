"""The tensor contract between the gateway and Triton's models, in one place.

Both sides import it: the models to read and write tensors, the gateway to build requests and parse
responses, and a test to hold the `config.pbtxt` files to it. Shapes have no batch dimension
(`max_batch_size: 0`); -1 is a free dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

__all__ = [
    "CONTEXT_IDS",
    "CONTROL",
    "CONTROL_RESULT",
    "ENGINE_INPUTS",
    "ENGINE_MODEL",
    "ENGINE_OUTPUTS",
    "ENSEMBLE_INPUTS",
    "ENSEMBLE_MODEL",
    "ENSEMBLE_OUTPUTS",
    "MODELS",
    "POSTPROCESSING_INPUTS",
    "POSTPROCESSING_MODEL",
    "POSTPROCESSING_OUTPUTS",
    "PREPROCESSING_INPUTS",
    "PREPROCESSING_MODEL",
    "PREPROCESSING_OUTPUTS",
    "STOP",
    "DataType",
    "DraftSource",
    "FinishReason",
    "GateReason",
    "TensorSpec",
]

ENSEMBLE_MODEL = "ensemble"
PREPROCESSING_MODEL = "preprocessing"
ENGINE_MODEL = "engine"
POSTPROCESSING_MODEL = "postprocessing"


class DataType(StrEnum):
    """Triton's data type names as they stand in requests; `config.pbtxt` adds `TYPE_`."""

    STRING = "BYTES"
    INT32 = "INT32"
    INT64 = "INT64"
    UINT64 = "UINT64"
    FP32 = "FP32"
    BOOL = "BOOL"


class FinishReason(StrEnum):
    """Why a generation ended; the empty string until then."""

    NONE = ""
    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    STOP_STRING = "stop_string"
    """The gateway finds these; the engine, which knows no text, never says so."""


class DraftSource(IntEnum):
    """Who drafted the tokens of a verify step."""

    NONE = 0
    EAGLE = 1
    NGRAM = 2
    DRAFT_MODEL = 3
    MEDUSA = 4


class GateReason(IntEnum):
    """Why the draft length of a step was what it was."""

    UNKNOWN = 0
    FIXED = 1
    """The draft length comes from the configuration."""
    REQUEST_CAP = 2
    """The request's own `max_draft_len` was below the configured draft length."""
    BUDGET = 3
    """Fewer tokens were left to emit, or fewer positions free, than the draft length."""
    NO_DRAFT = 4
    """The drafter had nothing to propose."""
    DISABLED = 5
    """The engine runs without a drafter, or with draft length 0."""
    PREFILL = 6
    """The step finished the request's prompt: its first token is not speculated."""
    OPERATOR = 7
    """An operator turned the gate off or fixed the draft length."""
    GAIN = 8
    """The gate found this draft length to emit the most tokens a second."""
    LOW_ACCEPTANCE = 9
    """The gate found drafts not to pay, since too few are accepted."""
    COMPUTE_BOUND = 10
    """The gate found drafts not to pay even if most were accepted: the batch fills the machine."""
    ITL_CEILING = 11
    """A longer draft would emit more, in steps longer than the operator allows."""
    DWELL = 12
    """Another draft length looked better, not by enough or not for long enough to switch."""
    PROBE = 13
    """A few rows drafted one token, to see whether drafts would pay again."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model."""

    name: str
    """The tensor's name on the wire."""
    dtype: DataType
    """Its data type."""
    dims: tuple[int, ...] = (1,)
    """Its shape; -1 is a free dimension."""
    optional: bool = False
    """Whether a request may leave it out."""


def _optional(name: str, dtype: DataType, *dims: int) -> TensorSpec:
    return TensorSpec(name, dtype, dims or (1,), optional=True)


STOP = "stop"
CONTROL = "control"
CONTROL_RESULT = "control_result"
CONTEXT_IDS = "context_ids"

_PROMPT_INPUTS = (
    _optional("text_input", DataType.STRING),
    _optional("messages", DataType.STRING),
    _optional("input_ids", DataType.INT32, -1),
)

_GENERATION_INPUTS = (
    _optional("resume_len", DataType.INT32),
    _optional("temperature", DataType.FP32),
    _optional("top_p", DataType.FP32),
    _optional("min_p", DataType.FP32),
    _optional("top_k", DataType.INT32),
    _optional("repetition_penalty", DataType.FP32),
    _optional("presence_penalty", DataType.FP32),
    _optional("frequency_penalty", DataType.FP32),
    _optional("seed", DataType.UINT64),
    _optional("verification", DataType.STRING),
    _optional("stop_token_ids", DataType.INT32, -1),
    _optional("ignore_eos", DataType.BOOL),
    _optional("logprobs", DataType.INT32),
    _optional("max_draft_len", DataType.INT32),
    _optional("deadline_ms", DataType.INT32),
    _optional("return_drafts", DataType.BOOL),
)

_GENERATION_OUTPUTS = (
    TensorSpec("output_ids", DataType.INT32, (-1,)),
    TensorSpec("chunk_index", DataType.INT32),
    # Not `logprobs`: inputs and outputs of an ensemble share one space of names.
    TensorSpec("token_logprobs", DataType.FP32, (-1,)),
    TensorSpec("top_logprobs", DataType.FP32, (-1,)),
    TensorSpec("top_ids", DataType.INT32, (-1,)),
    TensorSpec("draft_lens", DataType.INT32, (-1,)),
    TensorSpec("accepted_lens", DataType.INT32, (-1,)),
    TensorSpec("draft_source", DataType.INT32, (-1,)),
    TensorSpec("draft_ids", DataType.INT32, (-1,)),
    TensorSpec("gate_reason", DataType.INT32),
    TensorSpec("batch_rows", DataType.INT32),
    TensorSpec("finish_reason", DataType.STRING),
    TensorSpec("prompt_len", DataType.INT32),
    TensorSpec("cached_len", DataType.INT32),
    TensorSpec("queue_us", DataType.INT64),
    TensorSpec("prefill_us", DataType.INT64),
)

ENSEMBLE_INPUTS = (
    *_PROMPT_INPUTS,
    TensorSpec("max_tokens", DataType.INT32),
    *_GENERATION_INPUTS,
)
ENSEMBLE_OUTPUTS = (TensorSpec("text_output", DataType.STRING), *_GENERATION_OUTPUTS)

PREPROCESSING_INPUTS = _PROMPT_INPUTS
PREPROCESSING_OUTPUTS = (TensorSpec("input_ids", DataType.INT32, (-1,)),)

# A `stop` or `control` request carries nothing else, so here everything is optional.
ENGINE_INPUTS = (
    _optional("input_ids", DataType.INT32, -1),
    _optional("max_tokens", DataType.INT32),
    *_GENERATION_INPUTS,
    _optional(STOP, DataType.BOOL),
    _optional(CONTROL, DataType.STRING),
)
ENGINE_OUTPUTS = (
    *_GENERATION_OUTPUTS,
    TensorSpec(CONTEXT_IDS, DataType.INT32, (-1,)),
    TensorSpec(CONTROL_RESULT, DataType.STRING),
)

POSTPROCESSING_INPUTS = (
    TensorSpec("output_ids", DataType.INT32, (-1,)),
    TensorSpec(CONTEXT_IDS, DataType.INT32, (-1,)),
    TensorSpec("finish_reason", DataType.STRING),
)
POSTPROCESSING_OUTPUTS = (TensorSpec("text_output", DataType.STRING),)

MODELS: Mapping[str, tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]] = {
    ENSEMBLE_MODEL: (ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS),
    PREPROCESSING_MODEL: (PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS),
    ENGINE_MODEL: (ENGINE_INPUTS, ENGINE_OUTPUTS),
    POSTPROCESSING_MODEL: (POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS),
}
"""Inputs and outputs of each model."""
