"""The Triton model `postprocessing`: from the new ids of one response to the new text.

It keeps no state: the engine hands over the few earlier ids that the text depends on.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftgate.backend.tensors import Inputs, Value
from draftgate.backend.text_model import TextModel
from draftgate.contract import CONTEXT_IDS, POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS
from draftgate.text import Tokenizer

__all__ = ["TritonPythonModel", "new_text"]


def new_text(tokenizer: Tokenizer, inputs: Inputs) -> str:
    """The text that a response's ids add. With a finish reason also what was held back.

    Raises DraftgateError(INVALID_ARGUMENT) naming the input at fault.
    """
    return tokenizer.delta(
        inputs.integers(CONTEXT_IDS) or (),
        inputs.integers("output_ids") or (),
        final=bool(inputs.text("finish_reason")),
    )


class TritonPythonModel(TextModel):
    """What Triton's Python backend loads."""

    inputs = POSTPROCESSING_INPUTS
    outputs = POSTPROCESSING_OUTPUTS

    def answer(self, tokenizer: Tokenizer, inputs: Inputs) -> Mapping[str, Value]:
        return {"text_output": new_text(tokenizer, inputs)}
