"""The Triton model `preprocessing`: from text, chat messages or ids to the ids of the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from draftgate.backend.tensors import Inputs, Value
from draftgate.backend.text_model import TextModel
from draftgate.contract import PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Tokenizer, parse_messages

__all__ = ["TritonPythonModel", "prompt_ids"]


def prompt_ids(tokenizer: Tokenizer, inputs: Inputs) -> list[int]:
    """The ids of the prompt that a request gives in one of three forms; at least one id.

    Raises DraftgateError(INVALID_ARGUMENT) naming the input at fault.
    """
    given = [spec.name for spec in PREPROCESSING_INPUTS if inputs.has(spec.name)]
    if len(given) != 1:
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT,
            f"{' and '.join(given) or 'prompt'}: got {len(given)} prompts, allowed: exactly one "
            "of text_input, messages and input_ids",
            field=given[0] if given else "text_input",
        )
    field = given[0]
    ids = _read(tokenizer, inputs, field)
    if not ids:
        raise DraftgateError(
            ErrorCode.INVALID_ARGUMENT,
            f"{field}: got an empty prompt, allowed: at least one token",
            field=field,
        )
    return ids


def _read(tokenizer: Tokenizer, inputs: Inputs, field: str) -> list[int]:
    if field == "input_ids":
        return inputs.integers(field) or []
    text = inputs.text(field) or ""
    if field == "messages":
        return tokenizer.encode_chat(parse_messages(text))
    return tokenizer.encode_prompt(text)


class TritonPythonModel(TextModel):
    """What Triton's Python backend loads."""

    inputs = PREPROCESSING_INPUTS
    outputs = PREPROCESSING_OUTPUTS

    def answer(self, tokenizer: Tokenizer, inputs: Inputs) -> Mapping[str, Value]:
        return {"input_ids": prompt_ids(tokenizer, inputs)}
