"""Stop strings found piece by piece are those that searching the whole text finds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftgate.text import StopStrings

SETTINGS = settings(max_examples=1000)

# Few characters, so that strings overlap with each other and with themselves.
texts = st.text("ab\u0301é🙂", max_size=40)
stop_lists = st.lists(st.text("ab\u0301é🙂", min_size=1, max_size=6), max_size=5)
cut_lists = st.lists(st.integers(0, 40), max_size=12)


def search(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What the whole text gives: that before the first complete stop string, and the string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    return [text[low:high] for low, high in pairwise(bounds)]


def longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How much of the end of `text` may still become a stop string."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, len(stop))
            if text.endswith(stop[:length])
        ),
        default=0,
    )


@given(text=texts, stops=stop_lists, cuts=cut_lists)
@example(text="aab", stops=["aab", "ab"], cuts=[1, 2])  # both complete: the longer one counts
@example(text="abab", stops=["abab", "ba"], cuts=[2])  # the one that is complete first counts
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3])  # overlaps with its own beginning
@example(text="ab", stops=["abb"], cuts=[1])  # never completed: nothing is lost
@example(text="", stops=["a"], cuts=[])
@SETTINGS
def test_equals_searching_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    following = StopStrings(stops)
    pieces = [following.push(piece) for piece in cut(text, cuts)]
    assert ("".join(pieces) + following.flush(), following.matched) == search(text, stops)


@given(text=texts, stops=stop_lists, cuts=cut_lists)
@SETTINGS
def test_holds_back_no_more_than_it_has_to(text: str, stops: list[str], cuts: list[int]) -> None:
    following = StopStrings(stops)
    read = shown = ""
    for piece in cut(text, cuts):
        read += piece
        shown += following.push(piece)
        if following.matched is not None:
            break
        assert shown == read[: len(read) - longest_beginning(read, stops)]


@pytest.mark.parametrize("piece_length", [1, 3, 1000])
def test_long_strings_that_nearly_match(piece_length: int) -> None:
    stops = ["a" * 255 + last for last in "bcdefghijklmnopq"]
    text = ("a" * 255 + "x") * 3 + "a" * 300 + "c" + "behind"
    following = StopStrings(stops)
    starts = range(0, len(text), piece_length)
    shown = "".join(following.push(text[start : start + piece_length]) for start in starts)
    assert following.matched == stops[1]
    assert shown + following.flush() == ("a" * 255 + "x") * 3 + "a" * 45


def test_what_comes_behind_the_stop_string_has_no_effect() -> None:
    following = StopStrings(["b"])
    assert following.push("abc") == "a"
    assert following.push("abc") == ""
    assert following.flush() == ""
    assert following.matched == "b"
