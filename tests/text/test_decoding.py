"""Detokenising piece by piece gives what decoding the whole gives.

The oracle is `Tokenizer.decode`, which is the tokenizers library's own decoder in Rust.
"""
# ruff: noqa: RUF001 (look-alike characters are what these texts are about)

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.text import Detokenizer, Tokenizer
from draftgate.text.decoding import make_decoder

TEXTS = [
    "Hello, world! 42 + 17 = 59",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 emoji with joiners 👍🏽",
    "日本語のテキスト。中文文本，한국어",
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 combining",
    "العربية עברית हिन्दी ไทย",
    "\x00\x01\t\r\n  \u00a0\u2028 \ufeff \ufffd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎𠜱𠝹 \U0010ffff",
]
SETTINGS = settings(max_examples=300)


def cut(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """The pieces of `ids` between the cuts; equal cuts make empty pieces."""
    bounds = [0, *sorted(min(at, len(ids)) for at in cuts), len(ids)]
    return [list(ids[low:high]) for low, high in pairwise(bounds)]


def stateful(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.flush()]


def stateless(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    texts: list[str] = []
    emitted: list[int] = []
    for index, piece in enumerate(pieces):
        context = emitted[tokenizer.context_start(emitted) :]
        final = index == len(pieces) - 1
        texts.append(tokenizer.delta(context, piece, final=final))
        emitted += piece
    return texts


def assert_exact(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int]) -> None:
    pieces = cut(ids, cuts)
    whole = tokenizer.decode(ids)
    assert "".join(stateful(tokenizer, pieces)) == whole
    assert "".join(stateless(tokenizer, pieces)) == whole
    so_far = ""
    for text in stateful(tokenizer, pieces):
        so_far += text
        assert whole.startswith(so_far)


# Ids under 17 are SmolLM2's special tokens; the 256 after them are the single bytes, so such runs
# are mostly invalid UTF-8. Ids past the vocabulary have no text.
any_ids = st.lists(
    st.one_of(
        st.integers(0, 16),
        st.integers(17, 272),
        st.integers(17, 272),
        st.integers(0, 49151),
        st.integers(49152, 60000),
    ),
    max_size=40,
)
any_cuts = st.lists(st.integers(0, 40), max_size=12)


@given(ids=any_ids, cuts=any_cuts)
@SETTINGS
def test_any_ids_in_any_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    assert_exact(tokenizer, ids, cuts)


@given(
    parts=st.lists(st.sampled_from(TEXTS) | st.text(max_size=12), max_size=4),
    specials=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 16)), max_size=4),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
@SETTINGS
def test_any_text_with_special_tokens_inside(
    tokenizer: Tokenizer, parts: list[str], specials: list[tuple[int, int]], cuts: list[int]
) -> None:
    ids = tokenizer.encode_prompt("".join(parts))
    for at, special in specials:
        ids.insert(min(at, len(ids)), special)
    assert_exact(tokenizer, ids, cuts)


@pytest.mark.parametrize("text", TEXTS)
def test_token_by_token_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_prompt(text)
    deltas = stateless(tokenizer, [[token] for token in ids])
    assert "".join(deltas) == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


def test_an_unfinished_character_is_held_back_then_flushed(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode_prompt("🙂")
    assert len(smile) > 1
    assert tokenizer.delta([], smile[:-1], final=False) == ""
    assert tokenizer.delta([], smile[:-1], final=True) == "\ufffd"
    assert tokenizer.delta(smile[:-1], smile[-1:], final=False) == "🙂"
    assert tokenizer.delta([], [], final=True) == ""


@given(ids=any_ids)
@SETTINGS
def test_byte_level_context_is_short(tokenizer: Tokenizer, ids: list[int]) -> None:
    context = ids[tokenizer.context_start(ids) :]
    assert sum(17 <= token < 49152 for token in context) <= 3


def test_no_context_after_a_whole_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt("Hello 日本")
    assert tokenizer.context_start(ids) == len(ids)
    assert tokenizer.context_start([]) == 0


# In the SentencePiece tokenizer 3 to 258 are the bytes, then pieces, then one added token.
sentencepiece_ids = st.lists(
    st.one_of(st.integers(0, 2), st.integers(3, 258), st.integers(259, 272)), max_size=40
)


@given(ids=sentencepiece_ids, cuts=any_cuts)
@example(ids=[259, 259], cuts=[1])  # the first space goes, the second stays
@example(ids=[1, 3 + 0x20, 261], cuts=[1, 2])  # the first space as a byte
@example(ids=[3 + 0xE2, 2, 3 + 0x82, 3 + 0xAC], cuts=[1, 2, 3])  # a run across a special token
@example(ids=[261, 3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF], cuts=[4])  # valid until it is not
@example(ids=[268, 269, 270], cuts=[1])
@SETTINGS
def test_sentencepiece_any_ids_in_any_pieces(
    sentencepiece: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert_exact(sentencepiece, ids, cuts)


@given(runs=st.lists(st.text(min_size=1, max_size=3), max_size=5), cuts=any_cuts)
@SETTINGS
def test_sentencepiece_runs_of_valid_bytes(
    sentencepiece: Tokenizer, runs: list[str], cuts: list[int]
) -> None:
    """Runs that form characters, which random bytes hardly ever do, with pieces between them."""
    ids = [token for run in runs for token in [*(3 + byte for byte in run.encode()), 260]]
    assert_exact(sentencepiece, ids[:-1], cuts)


def test_sentencepiece_holds_a_run_of_bytes_until_it_ends(sentencepiece: Tokenizer) -> None:
    euro = [3 + byte for byte in "€".encode()]
    assert stateless(sentencepiece, [[265], euro, [261], []]) == ["hello", "", "€a", ""]
    assert stateless(sentencepiece, [[265], euro, [3 + 0xFF], []]) == [
        "hello",
        "",
        "",
        "\ufffd" * 4,
    ]


def test_sentencepiece_without_the_strip_keeps_the_first_space() -> None:
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    stream = make_decoder({"type": "Sequence", "decoders": steps}, {0: "▁a"}).stream()
    assert stream.push([0]) + stream.flush() == " a"


@pytest.mark.parametrize(
    ("description", "name"),
    [
        (None, "none"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Metaspace", "replacement": "▁"}, "Metaspace"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}, "Fuse"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "Replace",
        ),
    ],
)
def test_other_decoders_are_refused_by_name(description: dict[str, object], name: str) -> None:
    with pytest.raises(DraftgateError, match=name) as caught:
        make_decoder(description, {})
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
