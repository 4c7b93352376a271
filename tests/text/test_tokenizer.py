from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Message, Tokenizer

WriteTokenizer = Callable[..., Path]


def test_a_raw_prompt_gets_the_special_tokens_of_the_post_processor(
    sentencepiece: Tokenizer,
) -> None:
    assert sentencepiece.encode_prompt("a") == [1, 263]
    assert sentencepiece.decode([1, 263]) == "a"


def test_a_chat_prompt_gets_only_the_special_tokens_of_its_template(
    tmp_path: Path, write_tokenizer: WriteTokenizer, sentencepiece_description: dict[str, Any]
) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    folder = write_tokenizer(
        tmp_path, sentencepiece_description, chat_template=template, bos_token="<s>"
    )
    assert Tokenizer.load(folder).encode_chat([Message("user", "a")]).count(1) == 1


@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_a_chat_as_a_raw_prompt_has_the_same_ids(
    tmp_path: Path,
    write_tokenizer: WriteTokenizer,
    sentencepiece_description: dict[str, Any],
    template: str,
) -> None:
    """The post-processor writes the first token, whether or not the template does too."""
    folder = write_tokenizer(
        tmp_path,
        sentencepiece_description,
        chat_template=template + "{{ messages[0].content }}",
        bos_token="<s>",
    )
    loaded = Tokenizer.load(folder)
    messages = [Message("user", "a")]
    assert loaded.encode_prompt(loaded.chat_as_raw_prompt(messages)) == loaded.encode_prompt("a")


def test_a_chat_as_a_raw_prompt_is_the_template_where_nothing_is_added(
    tokenizer: Tokenizer,
) -> None:
    messages = [Message("user", "a")]
    assert tokenizer.chat_as_raw_prompt(messages) == tokenizer.render_chat(messages)


def test_the_real_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode_prompt("") == []
    assert tokenizer.decode(tokenizer.encode_prompt("<|im_start|>x")) == "x"


@pytest.mark.parametrize("text", ["Hello, Grüße 🙂 <|im_start|>\n" * 200, "a" * 2048, "a" * 2047])
def test_long_texts_are_no_different(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_prompt(text)
    pieces = [tokenizer.encode_prompt(piece) for piece in text.splitlines(keepends=True)]
    assert tokenizer.decode(ids) == tokenizer.delta((), ids, final=True)
    assert ids == [each for piece in pieces for each in piece]
    chat = tokenizer.encode_chat([Message("user", text)])
    assert chat == tokenizer.encode_prompt(tokenizer.render_chat([Message("user", text)]))


def test_truncation_and_padding_of_the_file_are_ignored(
    tmp_path: Path, write_tokenizer: WriteTokenizer, sentencepiece_description: dict[str, Any]
) -> None:
    description = sentencepiece_description | {
        "truncation": {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
        },
    }  # fmt: skip
    loaded = Tokenizer.load(write_tokenizer(tmp_path, description))
    assert len(loaded.encode_prompt("b b b")) == 7


def test_text_without_a_utf8_form_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DraftgateError, match="text_input: got a lone surrogate at character 2"):
        tokenizer.encode_prompt("ab\ud83d")


def test_no_chat_template(sentencepiece: Tokenizer) -> None:
    assert not sentencepiece.has_chat_template
    with pytest.raises(DraftgateError, match="no chat template") as caught:
        sentencepiece.encode_chat([Message("user", "x")])
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "not a tokenizer"),
        (b'{"model": {"type": "Nope"}}', "not a tokenizer"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DraftgateError, match=fault) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code is ErrorCode.FAILED_PRECONDITION
    assert "tokenizer.json" in caught.value.message
