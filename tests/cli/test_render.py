"""How the text of a chunk is cut by origin."""

from __future__ import annotations

import logging
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1.generation_pb2 import (
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_TARGET,
    TokenChunk,
)
from draftgate.cli.render import Kind, LogFormatter, clean, pieces
from tests.fakes.gateway import verified

texts = st.lists(st.text(max_size=4), max_size=3)


def chunk_of(steps: list[tuple[list[str], list[str], str]]) -> TokenChunk:
    chunk = TokenChunk()
    for step in steps:
        one = verified(*step).tokens
        text = chunk.text + one.text
        chunk.MergeFrom(one)
        chunk.text = text
    return chunk


@given(st.lists(st.tuples(texts, texts, st.text(max_size=4)), max_size=3), st.booleans())
def test_the_pieces_say_where_each_token_came_from(
    steps: list[tuple[list[str], list[str], str]], show_rejected: bool
) -> None:
    chunk = chunk_of(steps)
    expected = [
        piece
        for accepted, rejected, own in steps
        for piece in (
            *((text, Kind.ACCEPTED) for text in accepted),
            *((text, Kind.REJECTED) for text in rejected if show_rejected),
            (own, Kind.TARGET),
        )
    ]
    assert pieces(chunk, show_rejected=show_rejected) == expected


def test_a_run_cut_short_has_no_token_of_the_targets_own() -> None:
    # The generation ended inside the accepted run.
    chunk = verified(["a", "b"], ["c"], "").tokens
    del chunk.tokens[2]
    assert pieces(chunk, show_rejected=True) == [
        ("a", Kind.ACCEPTED),
        ("b", Kind.ACCEPTED),
        ("c", Kind.REJECTED),
    ]


def test_text_that_the_tokens_do_not_account_for_stays_whole() -> None:
    chunk = TokenChunk(text="whole")
    chunk.tokens.add(id=1, source=TOKEN_SOURCE_DRAFT)
    chunk.tokens.add(id=2, source=TOKEN_SOURCE_TARGET)
    assert pieces(chunk, show_rejected=True) == [("whole", Kind.PLAIN)]


@given(st.text())
def test_clean_text_has_no_control_characters_and_keeps_all_else(text: str) -> None:
    expected = [c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc"]
    assert clean(text) == "".join(expected)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (logging.INFO, "draftgate: worker 2: serving"),
        (logging.ERROR, "worker 2: ERROR some.module: serving"),
    ],
)
def test_a_record_of_a_worker_says_of_which(level: int, shown: str) -> None:
    record = logging.LogRecord("some.module", level, "", 0, "serving", (), None)
    assert "worker" not in LogFormatter().format(record)
    record.worker = 2
    assert LogFormatter().format(record) == shown
