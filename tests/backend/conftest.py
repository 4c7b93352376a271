"""A strict stand-in for `triton_python_backend_utils`, which only exists inside Triton's stub."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


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


class FakeRequest:
    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = {name: FakeTensor(name, array) for name, array in tensors.items()}


class FakePbUtils:
    Tensor = FakeTensor
    InferenceResponse = FakeResponse
    TritonError = FakeTritonError
    TritonModelException = FakeModelError
    Request = FakeRequest

    @staticmethod
    def get_input_tensor_by_name(request: FakeRequest, name: str) -> Any:
        return request.tensors.get(name)


@pytest.fixture
def pb_utils() -> type[FakePbUtils]:
    return FakePbUtils
