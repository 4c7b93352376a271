from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import pytest

from draftgate.backend.tensors import Inputs, error_response, response
from draftgate.contract import DataType, TensorSpec
from draftgate.errors import DraftgateError, ErrorCode, from_wire

SPECS = (
    TensorSpec("count", DataType.INT32),
    TensorSpec("seed", DataType.UINT64, optional=True),
    TensorSpec("heat", DataType.FP32, optional=True),
    TensorSpec("on", DataType.BOOL, optional=True),
    TensorSpec("words", DataType.STRING, optional=True),
    TensorSpec("ids", DataType.INT32, (-1,), optional=True),
)


class Word(StrEnum):
    NAIVE = "naïve 🙂\0"
    OTHER = "other"


def strings(*items: bytes) -> np.ndarray:
    return np.array(items, dtype=object)


def test_reads_every_type(pb_utils: Any) -> None:
    request = pb_utils.Request(
        count=np.array([-3], np.int32),
        seed=np.array([2**64 - 1], np.uint64),
        heat=np.array([0.5], np.float32),
        on=np.array([True]),
        words=strings("naïve 🙂\0".encode()),
        ids=np.array([], np.int32),
    )
    inputs = Inputs(pb_utils, request, SPECS)
    assert inputs.integer("count") == -3
    assert inputs.integer("seed") == 2**64 - 1
    assert inputs.number("heat") == 0.5
    assert inputs.flag("on") is True
    assert inputs.text("words") == "naïve 🙂\0"
    assert inputs.choice("words", Word) is Word.NAIVE
    assert inputs.integers("ids") == []
    assert inputs.has("ids")


def test_optional_tensors_read_as_none(pb_utils: Any) -> None:
    inputs = Inputs(pb_utils, pb_utils.Request(count=np.array([1], np.int32)), SPECS)
    assert inputs.integer("seed") is None
    assert inputs.number("heat") is None
    assert inputs.flag("on") is None
    assert inputs.text("words") is None
    assert inputs.choice("words", Word) is None
    assert inputs.integers("ids") is None
    assert not inputs.has("ids")


@pytest.mark.parametrize(
    ("read", "name", "array", "fault"),
    [
        ("integer", "count", None, "missing"),
        ("integer", "count", np.array([1], np.int64), "int64"),
        ("integer", "count", np.array([1, 2], np.int32), "[2]"),
        ("integer", "count", np.array([], np.int32), "[0]"),
        ("integer", "seed", np.array([-1], np.int64), "int64"),
        ("number", "heat", np.array([np.nan], np.float32), "nan"),
        ("number", "heat", np.array([np.inf], np.float32), "inf"),
        ("number", "heat", np.array([1.0], np.float64), "float64"),
        ("flag", "on", np.array([1], np.int32), "int32"),
        ("text", "words", strings(b"secret \xf0\x9f"), "byte 7"),
        ("text", "words", strings(b"a", b"b"), "[2]"),
        ("integers", "ids", np.array([[1, 2]], np.int32), "[1, 2]"),
        ("integers", "ids", np.array([1.5], np.float32), "float32"),
    ],
)
def test_names_the_tensor_at_fault(
    pb_utils: Any, read: str, name: str, array: np.ndarray | None, fault: str
) -> None:
    request = pb_utils.Request(**({} if array is None else {name: array}))
    with pytest.raises(DraftgateError) as caught:
        getattr(Inputs(pb_utils, request, SPECS), read)(name)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field == name
    assert caught.value.message.startswith(f"{name}: ")
    assert fault in caught.value.message
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("given", ["", "Other", "other ", "NAIVE", "x" * 5000])
def test_a_text_that_is_no_choice_is_refused(pb_utils: Any, given: str) -> None:
    inputs = Inputs(pb_utils, pb_utils.Request(words=strings(given.encode())), SPECS)
    with pytest.raises(DraftgateError) as caught:
        inputs.choice("words", Word)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "words")
    assert caught.value.message.startswith(f"words: got {given[:70]!r}"[:-1])
    assert caught.value.message.endswith(", allowed: naïve 🙂\0 or other")
    assert len(caught.value.message) < 200


def test_a_response_has_every_tensor_of_the_model_that_is_wanted(pb_utils: Any) -> None:
    values = {"count": 4, "words": "é", "ids": [5, 6], "heat": np.float32(2.0)}
    tensors = response(pb_utils, SPECS, values, {spec.name for spec in SPECS}).tensors
    assert {name: array.tolist() for name, array in tensors.items()} == {
        "count": [4],
        "seed": [],
        "heat": [2.0],
        "on": [],
        "words": ["é".encode()],
        "ids": [5, 6],
    }
    assert [array.dtype for array in tensors.values()] == [
        np.int32, np.uint64, np.float32, np.bool_, object, np.int32,
    ]  # fmt: skip
    assert list(response(pb_utils, SPECS, values, {"ids", "seed"}).tensors) == ["seed", "ids"]


def test_a_response_refuses_unknown_tensors(pb_utils: Any) -> None:
    with pytest.raises(KeyError, match="typo"):
        response(pb_utils, SPECS, {"typo": 1}, ["typo"])


@pytest.mark.parametrize("code", ErrorCode)
def test_errors_keep_their_exact_code_and_field(pb_utils: Any, code: ErrorCode) -> None:
    error = error_response(pb_utils, DraftgateError(code, "no room", field="ids[3]")).error
    read = from_wire(f"in ensemble 'ensemble', {error.message}")
    assert read is not None
    assert (read.code, read.message, read.field) == (code, "no room", "ids[3]")
