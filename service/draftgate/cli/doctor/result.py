"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Result", "Verdict", "fail", "ok", "warn"]


class Verdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It works, and may stop to."""
    FAIL = "fail"
    """It does not work."""


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    name: str
    """What was looked at."""
    verdict: Verdict
    found: str
    remedy: str = ""
    """What to do; empty where nothing is to be done, or where `found` says it."""


def ok(name: str, found: str) -> Result:
    return Result(name, Verdict.OK, found)


def warn(name: str, found: str, remedy: str) -> Result:
    return Result(name, Verdict.WARN, found, remedy)


def fail(name: str, found: str, remedy: str = "") -> Result:
    return Result(name, Verdict.FAIL, found, remedy)
