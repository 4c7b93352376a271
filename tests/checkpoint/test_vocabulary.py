"""Two tokenizers are told apart by what their ids mean, and by nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.checkpoint import vocabulary_digest
from draftgate.errors import DraftgateError, ErrorCode

BPE: dict[str, Any] = {
    "added_tokens": [{"id": 3, "content": "<end>", "special": True}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
}


def digest(folder: Path, content: object) -> str | None:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return vocabulary_digest(folder)


def changed(**model: Any) -> dict[str, Any]:
    return {**BPE, "model": {**BPE["model"], **model}}


def test_what_ids_mean_decides(tmp_path: Path) -> None:
    plain = digest(tmp_path, BPE)
    assert plain is not None
    same = {**BPE, "truncation": {"max_length": 5}, "added_tokens": [{"id": 3, "content": "<end>"}]}
    assert digest(tmp_path, same) == plain
    assert digest(tmp_path, changed(merges=[["a", "b"]])) == plain
    assert digest(tmp_path, changed(vocab={"b": 1, "ab": 2, "a": 0})) == plain
    others = [
        changed(vocab={"a": 1, "b": 0, "ab": 2}),
        changed(merges=["b a"]),
        {**BPE, "added_tokens": [{"id": 3, "content": "<stop>"}]},
        changed(vocab=[["a", -1.0], ["b", -2.0]]),
        changed(vocab=[["b", -1.0], ["a", -2.0]]),
    ]
    assert len({plain, *(digest(tmp_path, other) for other in others)}) == 6


def test_a_drafters_folder_may_name_the_digest_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"target_vocabulary_sha256": "abc"}))
    assert vocabulary_digest(tmp_path) == "abc"
    (tmp_path / "config.json").write_text("{}")
    assert vocabulary_digest(tmp_path) is None


def test_a_tokenizer_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="describes no model") as caught:
        digest(tmp_path, {"model": None})
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
