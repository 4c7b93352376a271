"""What the two text models have in common: a tokenizer, and one answer for every request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from draftgate.backend.environment import model_dir
from draftgate.backend.tensors import (
    Inputs,
    Value,
    error_response,
    load_pb_utils,
    loading,
    response,
    unforeseen,
)
from draftgate.contract import TensorSpec
from draftgate.errors import DraftgateError
from draftgate.text import Tokenizer

__all__ = ["TextModel"]


class TextModel(ABC):
    """A model as Triton's Python backend loads it. A request that is at fault gets an error of its
    own and leaves the others of its batch alone."""

    inputs: ClassVar[tuple[TensorSpec, ...]]
    """The tensors that a request may carry."""
    outputs: ClassVar[tuple[TensorSpec, ...]]
    """The tensors of a response."""

    @abstractmethod
    def answer(self, tokenizer: Tokenizer, inputs: Inputs) -> Mapping[str, Value]:
        """The output values for one request. Raises DraftgateError if the request is at fault."""

    def initialize(self, args: Mapping[str, str]) -> None:
        self._pb_utils = load_pb_utils()
        with loading(self._pb_utils):
            self._tokenizer = Tokenizer.load(model_dir())

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            values = self.answer(self._tokenizer, Inputs(self._pb_utils, request, self.inputs))
        except DraftgateError as error:
            return error_response(self._pb_utils, error)
        except Exception as error:  # noqa: BLE001 - the others of the batch must not suffer
            return error_response(self._pb_utils, unforeseen(error))
        return response(self._pb_utils, self.outputs, values, request.requested_output_names())
