"""The models name tensors in their errors; callers know fields."""

from __future__ import annotations

import dataclasses
import re

from draftgate.errors import DraftgateError
from draftgate.sampling import SamplingParams
from draftgate.upstream.types import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt

__all__ = ["in_callers_words", "within"]

_PATH = re.compile(r"(\w+)(.*)", re.S)
_PROMPT_TENSORS = ("text_input", "messages", "input_ids")
_PROMPT_FIELDS = {TextPrompt: "prompt", ChatPrompt: "messages", TokenPrompt: "input_ids"}
# These stand at the root of a request, beside `sampling`.
_ROOT_FIELDS = {"max_tokens", "max_draft_len", "return_drafts"}
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} - _ROOT_FIELDS


def in_callers_words(error: DraftgateError, request: GenerationRequest) -> DraftgateError:
    """An error about a tensor as one about the field that it came from."""
    path = _PATH.match(error.field)
    if path is None:
        return error
    tensor, place = path.groups()
    if tensor in _PROMPT_TENSORS:
        field = _PROMPT_FIELDS[type(request.prompt)]
        # A place among the ids says nothing to a caller who gave text.
        field += place if field == tensor else ""
    elif tensor in _SAMPLING_FIELDS:
        field = f"sampling.{error.field}"
    else:
        return error
    return DraftgateError(error.code, field + error.message.removeprefix(error.field), field=field)


def within(path: str, error: DraftgateError) -> DraftgateError:
    """An error about a field as one about the field of a message that stands under `path`."""
    if not error.field:
        return error
    return DraftgateError(error.code, f"{path}.{error.message}", field=f"{path}.{error.field}")
