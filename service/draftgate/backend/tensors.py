"""Reading and writing the contract's tensors inside Triton's Python backend.

`pb_utils` stands for `triton_python_backend_utils`, a module that only exists inside Triton's stub
process. Everything here takes it as an argument; `load_pb_utils` is the one place that imports it.
"""

from __future__ import annotations

import importlib
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from draftgate.contract import DataType, TensorSpec
from draftgate.errors import DraftgateError, ErrorCode, invalid_argument, to_wire

__all__ = [
    "Inputs",
    "PbUtils",
    "Value",
    "error_response",
    "load_pb_utils",
    "loading",
    "response",
    "unforeseen",
]

_LOG = logging.getLogger(__name__)

_Choice = TypeVar("_Choice", bound=StrEnum)

Value = bool | int | float | str | Sequence[int] | Sequence[float] | npt.NDArray[Any]

_NUMPY_TYPES: dict[DataType, np.dtype[Any]] = {
    DataType.STRING: np.dtype(object),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.FP32: np.dtype(np.float32),
    DataType.BOOL: np.dtype(np.bool_),
}

# Triton has fewer codes than Draftgate; the exact one travels in the message (`errors.to_wire`).
_TRITON_CODES: dict[ErrorCode, str] = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.NOT_FOUND: "NOT_FOUND",
    ErrorCode.ALREADY_EXISTS: "ALREADY_EXISTS",
    ErrorCode.RESOURCE_EXHAUSTED: "UNAVAILABLE",
    ErrorCode.UNAVAILABLE: "UNAVAILABLE",
    ErrorCode.CANCELLED: "CANCELLED",
    ErrorCode.UNIMPLEMENTED: "UNSUPPORTED",
}


class PbUtils(Protocol):
    """The part of `triton_python_backend_utils` that Draftgate uses."""

    Tensor: Any
    InferenceResponse: Any
    TritonError: Any
    TritonModelException: Any
    TRITONSERVER_RESPONSE_COMPLETE_FINAL: int

    def get_input_tensor_by_name(self, request: Any, name: str) -> Any:
        """The request's tensor, or None."""


def load_pb_utils() -> PbUtils:
    """The real module. Raises ImportError outside Triton's stub process."""
    return cast("PbUtils", importlib.import_module("triton_python_backend_utils"))


class Inputs:
    """Typed reads of one request's tensors, checked against the model's specs.

    Every read returns None for an optional tensor that the request leaves out, and raises
    DraftgateError(INVALID_ARGUMENT) naming the tensor if it is missing but required, or has the
    wrong data type, shape or content. What `text` reads never stands in a message.
    """

    def __init__(self, pb_utils: PbUtils, request: Any, specs: Sequence[TensorSpec]) -> None:
        self._pb_utils = pb_utils
        self._request = request
        self._specs = {spec.name: spec for spec in specs}

    def has(self, name: str) -> bool:
        """Whether the request carries the tensor."""
        return self._tensor(self._specs[name]) is not None

    def integer(self, name: str) -> int | None:
        """The value of an INT32, INT64 or UINT64 tensor of shape [1]."""
        array = self._array(name)
        return None if array is None else int(array[0])

    def number(self, name: str) -> float | None:
        """The value of an FP32 tensor of shape [1]; it must be finite."""
        array = self._array(name)
        if array is None:
            return None
        value = float(array[0])
        if not np.isfinite(value):
            raise invalid_argument(name, value, "a finite number")
        return value

    def flag(self, name: str) -> bool | None:
        """The value of a BOOL tensor of shape [1]."""
        array = self._array(name)
        return None if array is None else bool(array[0])

    def text(self, name: str) -> str | None:
        """The value of a STRING tensor of shape [1]; it must be UTF-8."""
        array = self._array(name)
        if array is None:
            return None
        raw = array[0]
        if isinstance(raw, str):
            return raw
        try:
            return bytes(raw).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{name}: got invalid UTF-8 at byte {error.start}, allowed: UTF-8 text",
                field=name,
            ) from error

    def choice(self, name: str, allowed: type[_Choice]) -> _Choice | None:
        """The value of a STRING tensor of shape [1] that is one of `allowed`."""
        value = self.text(name)
        if value is None:
            return None
        try:
            return allowed(value)
        except ValueError:
            raise invalid_argument(name, value, " or ".join(allowed)) from None

    def integers(self, name: str) -> list[int] | None:
        """The values of an INT32 tensor of shape [-1]; it may be empty."""
        array = self._array(name)
        return None if array is None else cast("list[int]", array.tolist())

    def _tensor(self, spec: TensorSpec) -> Any:
        tensor = self._pb_utils.get_input_tensor_by_name(self._request, spec.name)
        if tensor is None and not spec.optional:
            raise DraftgateError(
                ErrorCode.INVALID_ARGUMENT,
                f"{spec.name}: missing, allowed: a {spec.dtype} tensor of shape {_shown(spec)}",
                field=spec.name,
            )
        return tensor

    def _array(self, name: str) -> npt.NDArray[Any] | None:
        spec = self._specs[name]
        tensor = self._tensor(spec)
        if tensor is None:
            return None
        array = cast("npt.NDArray[Any]", tensor.as_numpy())
        if array.dtype != _NUMPY_TYPES[spec.dtype]:
            raise _wrong(spec, f"data type {array.dtype}")
        if len(array.shape) != len(spec.dims) or any(
            want not in (-1, got) for want, got in zip(spec.dims, array.shape, strict=True)
        ):
            raise _wrong(spec, f"shape {list(array.shape)}")
        return array


def response(
    pb_utils: PbUtils,
    specs: Sequence[TensorSpec],
    values: Mapping[str, Value],
    wanted: Collection[str],
) -> Any:
    """A response with every tensor of `specs` that the request wants (`requested_output_names`):
    the value given, else an empty one of shape [0].

    All of those have to be there because an ensemble waits for each tensor it maps. No other may
    be: up to Triton 24.12 the backend drops it from the response without holding the interpreter's
    lock and so corrupts the heap (triton-inference-server/python_backend#390). Scalars become
    shape [1]. Raises KeyError for a value that `specs` does not name.
    """
    unknown = values.keys() - {spec.name for spec in specs}
    if unknown:
        raise KeyError(f"not outputs of this model: {sorted(unknown)}")
    tensors = [
        pb_utils.Tensor(spec.name, _to_numpy(spec.dtype, values.get(spec.name, ())))
        for spec in specs
        if spec.name in wanted
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def error_response(pb_utils: PbUtils, error: DraftgateError) -> Any:
    """A response that carries `error`, readable by `errors.from_wire`."""
    code = getattr(pb_utils.TritonError, _TRITON_CODES.get(error.code, "INTERNAL"))
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(to_wire(error), code))


def unforeseen(error: Exception) -> DraftgateError:
    """What a caller hears of a mistake of ours: its kind and no more, for its text may hold theirs.

    Where it happened goes to the log, without that text.
    """
    places = "".join(traceback.format_tb(error.__traceback__))
    _LOG.error("a request failed with %s:\n%s", type(error).__name__, places)
    return DraftgateError(ErrorCode.INTERNAL, f"the model failed ({type(error).__name__})")


@contextmanager
def loading(pb_utils: PbUtils) -> Iterator[None]:
    """For a model's `initialize`: a DraftgateError becomes one line of Triton's log that
    `errors.from_wire` reads back."""
    try:
        yield
    except DraftgateError as error:
        raise pb_utils.TritonModelException(to_wire(error)) from error


def _to_numpy(dtype: DataType, value: Value) -> npt.NDArray[Any]:
    if isinstance(value, str):
        return np.array([value.encode("utf-8")], dtype=object)
    array: npt.NDArray[Any] = np.atleast_1d(np.asarray(value, dtype=_NUMPY_TYPES[dtype]))
    return array


def _shown(spec: TensorSpec) -> str:
    return str(list(spec.dims))


def _wrong(spec: TensorSpec, got: str) -> DraftgateError:
    return DraftgateError(
        ErrorCode.INVALID_ARGUMENT,
        f"{spec.name}: got {got}, allowed: a {spec.dtype} tensor of shape {_shown(spec)}",
        field=spec.name,
    )
