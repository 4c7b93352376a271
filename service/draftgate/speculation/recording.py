"""Reading what `draftgate gate record` writes: one JSON line a step of a live server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.speculation.fields import Fields
from draftgate.speculation.record import STEPS_FORMAT
from draftgate.speculation.world import Kind, Phase, Requests

__all__ = ["RecordedStep", "is_recording", "read_recording", "recorded_phases", "recorded_requests"]

_MOST = 10**12
_LONGEST = 256


@dataclass(frozen=True)
class RecordedStep:
    """What a replay needs of a line."""

    rows: int
    prefill_tokens: int
    kv_tokens: int
    outcomes: Sequence[tuple[int, int]]
    """Drafted and accepted, of the rows that drafted."""
    measured_ms: float


def is_recording(path: Path) -> bool:
    """Whether the file begins as a recording does.

    Raises DraftgateError(FAILED_PRECONDITION) where it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as file:
            header = json.loads(file.readline())
    except OSError as error:
        raise DraftgateError(
            ErrorCode.FAILED_PRECONDITION, f"cannot read {path}: {error.strerror}"
        ) from error
    except ValueError:
        return False
    return isinstance(header, dict) and header.get("format") == STEPS_FORMAT


def read_recording(path: Path) -> list[RecordedStep]:
    """The steps in which rows decoded.

    Raises DraftgateError(INVALID_ARGUMENT) naming the line and what is wrong with it.
    """
    steps = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 or not line.strip():
                continue
            name = f"{path}: line {number}"
            try:
                raw = json.loads(line)
            except ValueError as error:
                raise invalid_argument(name, line.rstrip()[:60], "a JSON object") from error
            found = Fields(name, raw)
            if "lost" not in found and (step := _step(found)).rows:
                steps.append(step)
    if not steps:
        raise invalid_argument(f"{path}: steps", 0, "at least one in which rows decoded")
    return steps


def recorded_phases(steps: Sequence[RecordedStep]) -> list[Phase]:
    """Runs of steps with as many rows, one phase each."""
    phases = []
    for rows, run in groupby(steps, key=lambda step: step.rows):
        found = list(run)
        chunks = [step.prefill_tokens for step in found if step.prefill_tokens]
        phases.append(
            Phase(
                rows=rows,
                duration_s=sum(step.measured_ms for step in found) / 1e3,
                context_tokens=found[0].kv_tokens // rows,
                prefill_every=round(len(found) / len(chunks)) if chunks else 0,
                prefill_tokens=round(sum(chunks) / len(chunks)) if chunks else 0,
            )
        )
    return phases


def recorded_requests(steps: Sequence[RecordedStep], name: str) -> Requests:
    """Requests that are all alike, with the acceptance by place of all drafts.

    name: of the file. Raises DraftgateError(INVALID_ARGUMENT) where nothing was drafted.
    """
    reached, accepted = np.zeros(_LONGEST), np.zeros(_LONGEST)
    for step in steps:
        for drafted, stood in step.outcomes:
            reached[: min(stood + 1, drafted)] += 1
            accepted[:stood] += 1
    places = int(np.count_nonzero(reached))
    if not places:
        raise invalid_argument(f"{name}: drafted", 0, "some drafted tokens, to see acceptance")
    rates = accepted[:places] / reached[:places]
    return Requests([Kind(1.0, rates.tolist())])


def _step(found: Fields) -> RecordedStep:
    outcomes = []
    for place, raw in enumerate(found.items("outcomes", empty=True)):
        name = found.name(f"outcomes[{place}]")
        if not isinstance(raw, list) or not all(type(value) is int for value in raw):
            raise invalid_argument(name, raw, "[source, drafted, accepted]")
        if len(raw) != 3 or not 0 <= raw[2] <= raw[1] <= _LONGEST:
            raise invalid_argument(name, raw, "[source, drafted, accepted]")
        outcomes.append((raw[1], raw[2]))
    return RecordedStep(
        rows=found.whole("rows", 0, 100_000),
        prefill_tokens=found.whole("prefill_tokens", 0, 10_000_000),
        kv_tokens=found.whole("kv_tokens", 0, _MOST),
        outcomes=outcomes,
        measured_ms=found.number("measured_ms", 0, _MOST),
    )
