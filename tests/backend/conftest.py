"""A strict stand-in for `triton_python_backend_utils`, which only exists inside Triton's stub."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from draftgate.contract import ENGINE_OUTPUTS, POSTPROCESSING_OUTPUTS, PREPROCESSING_OUTPUTS

_EVERYTHING = [
    spec.name for spec in (*PREPROCESSING_OUTPUTS, *ENGINE_OUTPUTS, *POSTPROCESSING_OUTPUTS)
]


class FakeTensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        assert isinstance(name, str)
        assert isinstance(array, np.ndarray)
        assert array.ndim >= 1
        if array.dtype == object:
            assert all(isinstance(item, bytes) for item in array.ravel())
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class FakeTritonError:
    INTERNAL, INVALID_ARG, NOT_FOUND, UNAVAILABLE = (
        "internal",
        "invalid",
        "not found",
        "unavailable",
    )
    ALREADY_EXISTS, CANCELLED, UNSUPPORTED = "exists", "cancelled", "unsupported"

    def __init__(self, message: str, code: int) -> None:
        self.message, self.code = message, code


class FakeModelError(Exception):
    pass


class FakeResponse:
    def __init__(
        self,
        output_tensors: list[FakeTensor] | None = None,
        error: FakeTritonError | None = None,
    ) -> None:
        assert (output_tensors is None) != (error is None)
        self.tensors = {tensor.name(): tensor.as_numpy() for tensor in output_tensors or []}
        self.error = error


FINAL = 1


class FakeSender:
    """One request's responses. Like the real one it takes nothing after the final flag; outputs
    that the request did not ask for, which the real one drops at the heap's peril, are refused."""

    def __init__(self, wanted: list[str]) -> None:
        self._wanted = frozenset(wanted)
        self.responses: list[FakeResponse] = []
        self.cancelled = False
        self.fails_at: int | None = None
        """The number of the response that cannot be sent."""
        self._ended = threading.Event()

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        assert not self._ended.is_set()
        assert flags in (0, FINAL)
        assert response is not None or flags == FINAL
        if self.fails_at == len(self.responses):
            self.fails_at = None
            raise RuntimeError("shared memory is full")
        if response is not None:
            assert response.error is not None or response.tensors.keys() <= self._wanted
            self.responses.append(response)
        if flags == FINAL:
            self._ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> list[FakeResponse]:
        """Everything sent, once the final flag was."""
        assert self._ended.wait(60)
        return self.responses


class FakeRequest:
    def __init__(
        self, request_id: str = "", wanted: list[str] | None = None, **tensors: np.ndarray
    ) -> None:
        self.tensors = {name: FakeTensor(name, array) for name, array in tensors.items()}
        self._wanted = _EVERYTHING if wanted is None else wanted
        self.sender = FakeSender(self._wanted)
        self._request_id = request_id

    def request_id(self) -> str:
        return self._request_id

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def get_response_sender(self) -> FakeSender:
        return self.sender


class FakePbUtils:
    Tensor = FakeTensor
    InferenceResponse = FakeResponse
    TritonError = FakeTritonError
    TritonModelException = FakeModelError
    Request = FakeRequest
    TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL

    @staticmethod
    def get_input_tensor_by_name(request: FakeRequest, name: str) -> Any:
        return request.tensors.get(name)


@pytest.fixture
def pb_utils() -> type[FakePbUtils]:
    return FakePbUtils
