from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftgate.backend import postprocessing, preprocessing
from draftgate.errors import ErrorCode, from_wire
from draftgate.text import Message, Tokenizer


def words(text: str | bytes) -> np.ndarray:
    return np.array([text if isinstance(text, bytes) else text.encode()], dtype=object)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def in_stub(monkeypatch: pytest.MonkeyPatch, pb_utils: Any, checkpoint_dir: Path) -> None:
    """The environment that Triton's stub gives a model."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb_utils)
    monkeypatch.setenv("DRAFTGATE_MODEL_DIR", str(checkpoint_dir))


@pytest.fixture
def pre(in_stub: None) -> preprocessing.TritonPythonModel:
    model = preprocessing.TritonPythonModel()
    model.initialize({})
    return model


@pytest.fixture
def post(in_stub: None) -> postprocessing.TritonPythonModel:
    model = postprocessing.TritonPythonModel()
    model.initialize({})
    return model


@pytest.fixture
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint_dir)


def test_prompts_in_all_three_forms(
    pre: preprocessing.TritonPythonModel, pb_utils: Any, tokenizer: Tokenizer
) -> None:
    messages = json.dumps([{"role": "user", "content": "Hi 🙂"}])
    answers = pre.execute(
        [
            pb_utils.Request(text_input=words("Hello 🙂")),
            pb_utils.Request(messages=words(messages)),
            pb_utils.Request(input_ids=ids(5, 6, 7)),
        ]
    )
    assert [answer.tensors["input_ids"].tolist() for answer in answers] == [
        tokenizer.encode_prompt("Hello 🙂"),
        tokenizer.encode_chat([Message("user", "Hi 🙂")]),
        [5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("tensors", "field", "fault"),
    [
        ({}, "text_input", "exactly one of text_input, messages and input_ids"),
        ({"text_input": words("x"), "input_ids": ids(1)}, "text_input", "got 2 prompts"),
        ({"messages": words("[]"), "input_ids": ids(1)}, "messages", "messages and input_ids: got"),
        ({"text_input": words("")}, "text_input", "empty prompt"),
        ({"input_ids": ids()}, "input_ids", "empty prompt"),
        ({"text_input": words(b"\xff")}, "text_input", "UTF-8"),
        ({"messages": words("")}, "messages", "invalid JSON"),
        ({"messages": words('[{"role": "user"}]')}, "messages[0].content", "got nothing"),
    ],
)
def test_a_bad_prompt_names_its_field_and_disturbs_no_other(
    pre: preprocessing.TritonPythonModel,
    pb_utils: Any,
    tensors: dict[str, np.ndarray],
    field: str,
    fault: str,
) -> None:
    good = pb_utils.Request(input_ids=ids(1))
    first, bad, last = pre.execute([good, pb_utils.Request(**tensors), good])
    error = from_wire(bad.error.message)
    assert error is not None
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, field)
    assert fault in error.message
    assert first.error is None
    assert last.error is None


def test_responses_of_one_generation_give_its_text(
    post: postprocessing.TritonPythonModel, pb_utils: Any, tokenizer: Tokenizer
) -> None:
    text = "A smile 🙂 and 日本"
    emitted = [*tokenizer.encode_prompt(text), *tokenizer.encode_prompt("🙂")[:1]]
    requests = []
    for index, token in enumerate(emitted):
        context = emitted[tokenizer.context_start(emitted[:index]) : index]
        requests.append(
            pb_utils.Request(
                output_ids=ids(token), context_ids=ids(*context), finish_reason=words("")
            )
        )
    context = emitted[tokenizer.context_start(emitted) :]
    requests.append(
        pb_utils.Request(output_ids=ids(), context_ids=ids(*context), finish_reason=words("length"))
    )
    texts = [answer.tensors["text_output"].item().decode() for answer in post.execute(requests)]
    assert "".join(texts) == text + "\ufffd"
    assert texts[-1] == "\ufffd"


def test_a_bad_response_names_its_tensor(
    post: postprocessing.TritonPythonModel, pb_utils: Any
) -> None:
    [answer] = post.execute([pb_utils.Request(output_ids=ids(1), context_ids=ids())])
    error = from_wire(answer.error.message)
    assert error is not None
    assert error.field == "finish_reason"


@pytest.mark.usefixtures("in_stub")
def test_a_checkpoint_without_tokenizer_fails_the_load(
    monkeypatch: pytest.MonkeyPatch, pb_utils: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTGATE_MODEL_DIR", str(tmp_path))
    with pytest.raises(pb_utils.TritonModelException) as caught:
        preprocessing.TritonPythonModel().initialize({})
    error = from_wire(str(caught.value))
    assert error is not None
    assert error.code is ErrorCode.FAILED_PRECONDITION
    assert str(tmp_path / "tokenizer.json") in error.message


@pytest.mark.usefixtures("in_stub")
def test_no_checkpoint_configured(monkeypatch: pytest.MonkeyPatch, pb_utils: Any) -> None:
    monkeypatch.delenv("DRAFTGATE_MODEL_DIR")
    with pytest.raises(pb_utils.TritonModelException, match="DRAFTGATE_MODEL_DIR is not set"):
        postprocessing.TritonPythonModel().initialize({})
