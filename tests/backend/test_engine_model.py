"""The engine's Triton model on a real engine: one request's trouble stays its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgate.backend import engine as backend
from draftgate.backend.environment import ENGINE_SETTINGS, MODEL_DIR
from draftgate.errors import ErrorCode, from_wire

Request = Callable[..., Any]


@pytest.fixture(scope="module")
def model(checkpoint_dir: Path) -> Iterator[backend.TritonPythonModel]:
    from tests.backend.conftest import FakePbUtils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "load_pb_utils", lambda: FakePbUtils)
        patch.setenv(MODEL_DIR, str(checkpoint_dir))
        patch.setenv(ENGINE_SETTINGS, json.dumps({"max_batch_rows": 4, "dtype": "float32"}))
        model = backend.TritonPythonModel()
        model.initialize({})
    yield model
    model.finalize()


@pytest.fixture
def ask(pb_utils: Any, model: backend.TritonPythonModel) -> Request:
    def made(request_id: str = "", wanted: list[str] | None = None, **tensors: Any) -> Any:
        arrays = {name: np.atleast_1d(value) for name, value in tensors.items()}
        request = pb_utils.Request(request_id, wanted, **arrays)
        model.execute([request])
        return request.sender

    return made


def prompt(**more: Any) -> dict[str, Any]:
    return {
        "input_ids": np.array([504, 2365, 282], np.int32),
        "max_tokens": np.int32(6),
        "temperature": np.float32(0),
        "ignore_eos": True,
        **more,
    }


def words(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


def error_of(responses: list[Any]) -> Any:
    return from_wire(responses[-1].error.message)


def test_a_generation_streams_what_each_step_made(ask: Request) -> None:
    responses = ask("one", **prompt()).wait()
    assert [int(r.tensors["chunk_index"][0]) for r in responses] == list(range(len(responses)))
    ids = [int(i) for r in responses for i in r.tensors["output_ids"]]
    assert len(ids) == 6
    assert responses[0].tensors["prompt_len"].tolist() == [3]
    assert responses[-1].tensors["finish_reason"].tolist() == [b"length"]
    assert [r.tensors["finish_reason"][0] for r in responses[:-1]] == [b""] * (len(responses) - 1)


@pytest.mark.parametrize("wanted", [["output_ids", "finish_reason"], ["context_ids"], []])
def test_a_response_holds_no_output_that_was_not_asked_for(ask: Request, wanted: list[str]) -> None:
    responses = ask("few", wanted, **prompt()).wait()
    assert [list(r.tensors) for r in responses] == [wanted] * len(responses)


def test_a_request_chooses_its_verification(ask: Request) -> None:
    def tokens(**more: Any) -> list[int]:
        sampled = prompt(temperature=np.float32(1), max_tokens=np.int32(12), **more)
        return [i for r in ask(**sampled).wait() for i in r.tensors["output_ids"].tolist()]

    seeded = tokens(seed=np.uint64(7))
    assert tokens(seed=np.uint64(7), verification=words("coupled")) == seeded
    rejection = tokens(
        seed=np.uint64(7), verification=words("rejection"), max_draft_len=np.int32(0)
    )
    assert rejection != seeded
    assert rejection == tokens(
        seed=np.uint64(7), verification=words("rejection"), max_draft_len=np.int32(0)
    )
    assert tokens(verification=words("coupled")) != tokens(verification=words("coupled"))


@pytest.mark.parametrize("text", ["", "greedy", "Coupled", "VERIFICATION_COUPLED"])
def test_another_verification_is_refused_by_name(ask: Request, text: str) -> None:
    error = error_of(ask(**prompt(verification=words(text))).wait())
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, "verification")
    assert error.message == f"verification: got {text!r}, allowed: rejection or coupled"


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_response_that_cannot_be_sent_ends_its_stream_alone(
    ask: Request, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [r.tensors["output_ids"].tolist() for r in ask("alone", **prompt()).wait()]
    doomed = ask("doomed", **prompt(max_tokens=np.int32(4000)))
    doomed.fails_at = len(doomed.responses) + fails_at
    other = ask("other", **prompt())
    assert [r.tensors["output_ids"].tolist() for r in other.wait()] == expected
    assert error_of(doomed.wait()).code is ErrorCode.INTERNAL
    assert "memory" not in doomed.responses[-1].error.message
    later = ask("doomed", **prompt())
    assert [r.tensors["output_ids"].tolist() for r in later.wait()] == expected


def test_a_caller_that_has_gone_frees_its_row(ask: Request) -> None:
    gone = ask("gone", **prompt(max_tokens=np.int32(4000)))
    gone.cancelled = True
    assert gone.wait()[-1].tensors["finish_reason"].tolist() == [b"cancelled"]


def test_stop_ends_the_generation_that_it_names(ask: Request) -> None:
    running = ask("running", **prompt(max_tokens=np.int32(4000)))
    assert ask("running", stop=True).wait() == []
    assert running.wait()[-1].tensors["finish_reason"].tolist() == [b"cancelled"]


def test_a_stop_for_a_refused_request_is_not_kept_for_the_next(ask: Request) -> None:
    refused = ask("reused", **prompt(top_p=np.float32(0)))
    assert error_of(refused.wait()).field == "top_p"
    ask("reused", stop=True).wait()
    responses = ask("reused", **prompt()).wait()
    assert responses[-1].tensors["finish_reason"].tolist() == [b"length"]


def test_a_stop_that_comes_first_ends_its_request(ask: Request) -> None:
    ask("overtaken", stop=True).wait()
    (response,) = ask("overtaken", **prompt()).wait()
    assert response.tensors["finish_reason"].tolist() == [b"cancelled"]
    assert ask("overtaken", **prompt()).wait()[-1].tensors["finish_reason"].tolist() == [b"length"]


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "1", '{"op": "fly"}', "{}", "[" * 100_000, '{"op": [1]}']
)
def test_control_is_refused_by_name(ask: Request, text: str) -> None:
    error = error_of(ask(control=words(text)).wait())
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert error.field.startswith("control")


def test_control_describes_and_counts(ask: Request) -> None:
    def control(operation: str) -> dict[str, Any]:
        (response,) = ask(control=words(json.dumps({"op": operation}))).wait()
        return dict(json.loads(response.tensors["control_result"][0]))

    assert control("describe")["max_batch_rows"] == 4
    assert control("describe")["kv_total_tokens"] > 0
    deadline_s = time.monotonic() + 20
    while control("counters")["running_rows"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    counters = control("counters")
    assert (counters["running_rows"], counters["kv_used_blocks"]) == (0, 0)


def test_what_was_not_foreseen_is_internal_and_says_nothing(
    ask: Request, model: backend.TritonPythonModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the prompt was: secret")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "_request", broken)
        error = error_of(ask("x", **prompt()).wait())
    assert error.code is ErrorCode.INTERNAL
    assert "secret" not in error.message
    assert ask("x", **prompt()).wait()[-1].error is None
