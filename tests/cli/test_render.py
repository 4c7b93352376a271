"""How the text of a chunk is cut by origin."""

from __future__ import annotations

import logging
import unicodedata
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate._pb.draftgate.v1.generation_pb2 import (
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_TARGET,
    TokenChunk,
)
from draftgate.cli.render import Kind, LogFormatter, Origins, clean
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
    assert Origins(show_rejected=show_rejected).pieces(chunk) == expected


@given(
    st.lists(st.tuples(texts, texts, st.text(max_size=4)), min_size=1, max_size=3),
    st.lists(st.integers(0, 40)),
    st.booleans(),
)
def test_text_that_comes_later_than_its_tokens_keeps_their_origin(
    steps: list[tuple[list[str], list[str], str]], cuts: list[int], show_rejected: bool
) -> None:
    """As it does where it may yet become a stop string."""
    chunk = chunk_of(steps)
    origins = Origins(show_rejected=show_rejected)
    at_once = Origins(show_rejected=show_rejected).pieces(chunk)
    text, places = chunk.text, sorted({min(each, len(chunk.text)) for each in cuts})
    chunk.text = text[: places[0]] if places else text
    found = origins.pieces(chunk)
    for start, end in zip(places, [*places[1:], len(text)], strict=False):
        found += origins.pieces(TokenChunk(text=text[start:end]))

    def characters(cut: list[tuple[str, Kind]]) -> list[tuple[str, Kind]]:
        return [(character, kind) for piece, kind in cut for character in piece]

    assert characters(found) == characters(at_once)


def test_the_tokens_of_a_stop_string_are_not_those_of_the_next_generation() -> None:
    origins = Origins(show_rejected=False)
    held = verified(["a", "EN"], [], "D").tokens
    held.text = "a"
    assert origins.pieces(held) == [("a", Kind.ACCEPTED)]
    origins.forget()
    after = verified(["b"], [], "c").tokens
    assert origins.pieces(after) == [("b", Kind.ACCEPTED), ("c", Kind.TARGET)]


def test_a_run_cut_short_has_no_token_of_the_targets_own() -> None:
    # The generation ended inside the accepted run.
    chunk = verified(["a", "b"], ["c"], "").tokens
    del chunk.tokens[2]
    assert Origins(show_rejected=True).pieces(chunk) == [
        ("a", Kind.ACCEPTED),
        ("b", Kind.ACCEPTED),
        ("c", Kind.REJECTED),
    ]


def test_text_that_the_tokens_do_not_account_for_stays_whole() -> None:
    chunk = TokenChunk(text="whole")
    chunk.tokens.add(id=1, source=TOKEN_SOURCE_DRAFT)
    chunk.tokens.add(id=2, source=TOKEN_SOURCE_TARGET)
    assert Origins(show_rejected=True).pieces(chunk) == [("whole", Kind.PLAIN)]


@given(st.text())
def test_clean_text_has_no_control_characters_and_keeps_all_else(text: str) -> None:
    expected = [c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc"]
    assert clean(text) == "".join(expected)


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (logging.INFO, "draftgate: {}serving"),
        (logging.ERROR, "{}ERROR some.module: serving"),
    ],
)
def test_a_record_begins_with_its_time_and_says_of_which_worker_it_is(
    level: int, shown: str
) -> None:
    record = logging.LogRecord("some.module", level, "", 0, "serving", (), None)
    record.created = datetime(2026, 2, 3, 4, 5, 6, 70_000, UTC).timestamp()
    time = "2026-02-03T04:05:06.070Z"
    assert LogFormatter().format(record) == f"{time} {shown.format('')}"
    record.worker = 2
    assert LogFormatter().format(record) == f"{time} {shown.format('worker 2: ')}"
