"""What goes wrong again and again, in the log."""

from __future__ import annotations

import logging

import pytest

from draftgate.upstream.complaint import Complaint, Novelty

_log = logging.getLogger("draftgate.some")


def complaint(**options: float) -> Complaint:
    return Complaint(_log, what="it is ill", over="it is well", fields={"who": "it"}, **options)


def test_it_is_told_when_it_begins_and_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    ill = complaint()
    assert not ill.over()
    for problem in ("a", "a", "a", "b", "b", "a"):
        ill.tell(problem)
    ill.tell("c", level=logging.ERROR)
    assert ill.over()
    assert not ill.over()
    ill.tell("c")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "it is ill: a"),
        ("WARNING", "it is ill: b"),
        ("WARNING", "it is ill: a"),
        ("ERROR", "it is ill: c"),
        ("WARNING", "it is well"),
        ("WARNING", "it is ill: c"),
    ]
    assert {getattr(each, "who", "") for each in caplog.records} == {"it"}
    assert getattr(caplog.records[1], "reason", "") == "b"


def test_it_is_told_again_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    ill = complaint(again_s=0.0)
    for _ in range(3):
        ill.tell("a")
    assert len(caplog.records) == 3


def test_a_text_is_new_once_and_again_after_its_time() -> None:
    novelty = Novelty()
    assert [novelty.of(text) for text in ("a", "b", "a", "b")] == [True, True, False, False]
    always = Novelty(again_s=0.0)
    assert [always.of("a") for _ in range(2)] == [True, True]


def test_no_more_texts_are_kept_than_a_log_needs() -> None:
    novelty = Novelty()
    for number in range(1000):
        assert novelty.of(str(number))
    assert not novelty.of("999")
    assert novelty.of("0")
