from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftgate.text import Tokenizer


def describe_sentencepiece() -> dict[str, Any]:
    """A Llama-2 style `tokenizer.json` over a few pieces, every byte, and added tokens."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", "▁▁", "a", "b", "▁a", "ab", "▁hello", "é", "日本", "<0xZZ>", "🙂"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content in specials,
            }
            for index, content in [*enumerate(specials), (len(tokens), "▁<tool>")]
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [["▁", "a"], ["a", "b"]],
        },
    }


def write(folder: Path, description: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint_dir: Path) -> Tokenizer:
    """The real model's tokenizer: byte-level BPE."""
    return Tokenizer.load(checkpoint_dir)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sentencepiece")
    return Tokenizer.load(write(folder, describe_sentencepiece()))


@pytest.fixture
def sentencepiece_description() -> dict[str, Any]:
    """What the `sentencepiece` tokenizer is made of, to be changed by a test."""
    return describe_sentencepiece()


@pytest.fixture
def write_tokenizer() -> Callable[..., Path]:
    """Makes a folder from a description and the keys of its `tokenizer_config.json`."""
    return write
