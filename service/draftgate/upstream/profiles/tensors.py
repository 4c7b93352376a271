"""Tensors of models that are not ours: written as their configuration says, read as they come."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.upstream.profiles.model_view import ModelView

__all__ = ["Answer", "RequestBuilder", "broken", "is_final"]

Value = bool | int | float | str

_CODES = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


class RequestBuilder:
    """One request to a model, with the batch dimension if the model wants one."""

    def __init__(self, model: ModelView, wire_id: str) -> None:
        self._model = model
        self.request = pb.ModelInferRequest(model_name=model.name, id=wire_id)
        # Without it a generation that ends on a flag alone would end without a last response.
        self.request.parameters["triton_enable_empty_final_response"].bool_param = True

    def add(
        self, name: str, *values: Value, shape: Sequence[int] | None = None, field: str = ""
    ) -> None:
        """Add an input; without a `shape` of one dimension.

        Raises DraftgateError(INVALID_ARGUMENT) naming the field, or else the input, for a number
        that its data type cannot hold. The model must have the input.
        """
        datatype = self._model.inputs[name]
        dims = list(shape or (len(values),))
        if self._model.max_batch_size:
            dims.insert(0, 1)
        content = _encode(field or name, datatype, values)
        self.request.inputs.add(name=name, datatype=datatype, shape=dims)
        self.request.raw_input_contents.append(content)

    def add_known(self, name: str, *values: Value) -> None:
        """Add an input if the model has it."""
        if name in self._model.inputs:
            self.add(name, *values)

    def want(self, names: Collection[str]) -> None:
        """Ask for these outputs, of those that the model has, and for no others."""
        for name in self._model.outputs:
            if name in names:
                self.request.outputs.add(name=name)


class Answer:
    """Reads of one response's tensors by what they are, not by what the configuration promised: a
    stock model sends numbers as text where it promised FP32.

    Reads raise DraftgateError(INTERNAL) for contents that fit no reading.
    """

    def __init__(self, response: pb.ModelInferResponse) -> None:
        if len(response.outputs) != len(response.raw_output_contents):
            raise broken("outputs without raw contents")
        self._tensors = {
            output.name: (output.datatype, content)
            for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        }

    def has(self, name: str) -> bool:
        return name in self._tensors

    def text(self, name: str) -> str | None:
        """The first string of a BYTES tensor; None if it is missing or empty."""
        datatype, content = self._tensors.get(name, ("BYTES", b""))
        if datatype != "BYTES":
            raise broken(f"{name} has data type {datatype}")
        if not content:
            return None
        if len(content) < 4 or len(content) < 4 + struct.unpack_from("<I", content)[0]:
            raise broken(f"{name} holds no string")
        (length,) = struct.unpack_from("<I", content)
        try:
            return content[4 : 4 + length].decode()
        except UnicodeDecodeError as error:
            raise broken(f"{name} is not UTF-8") from error

    def word(self, name: str) -> str:
        """A string that stands for a word; empty if it is missing or the text None."""
        value = self.text(name)
        return "" if value is None or value == "None" else value

    def integers(self, name: str) -> tuple[int, ...]:
        """All numbers of an integer tensor, whatever its shape."""
        datatype, content = self._tensors.get(name, ("INT32", b""))
        if datatype not in _CODES or datatype in ("BOOL", "FP16", "FP32", "FP64"):
            raise broken(f"{name} has data type {datatype}")
        return tuple(int(value) for value in _numbers(name, datatype, content))

    def integer(self, name: str) -> int | None:
        """The first number of a tensor of numbers or of text that holds one; None without."""
        datatype, content = self._tensors.get(name, ("BYTES", b""))
        if datatype == "BYTES":
            value = _number(name, self.word(name))
        elif datatype in _CODES:
            value = next(iter(_numbers(name, datatype, content)), None)
        else:
            raise broken(f"{name} has data type {datatype}")
        return None if value is None or not math.isfinite(value) else int(value)


def is_final(response: pb.ModelInferResponse) -> bool:
    """Whether Triton marked the response as the last one to its request."""
    flag = "triton_final_response"
    return flag in response.parameters and response.parameters[flag].bool_param


def broken(problem: str) -> DraftgateError:
    """The error for a response that is not what such a model sends."""
    return DraftgateError(ErrorCode.INTERNAL, f"the model sent an unusable response: {problem}")


def _encode(name: str, datatype: str, values: Sequence[Value]) -> bytes:
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype not in _CODES:
        raise broken(f"its configuration gives {name} the data type {datatype}")
    try:
        return struct.pack(f"<{len(values)}{_CODES[datatype]}", *values)
    except (struct.error, OverflowError):
        shown = values[0] if len(values) == 1 else f"{len(values)} values"
        raise invalid_argument(name, shown, f"what the model's {datatype} can hold") from None


def _numbers(name: str, datatype: str, content: bytes) -> tuple[float, ...]:
    code = _CODES[datatype]
    count, rest = divmod(len(content), struct.calcsize("<" + code))
    if rest:
        raise broken(f"{name} has {len(content)} bytes")
    return struct.unpack(f"<{count}{code}", content)


def _number(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError as error:
        raise broken(f"{name} is text that is no number") from error
