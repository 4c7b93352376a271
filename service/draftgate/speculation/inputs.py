"""Reading what a replay is given: acceptance and load, from files of their own or from a recording
of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from draftgate.errors import invalid_argument
from draftgate.jsonfile import read_object
from draftgate.speculation.fields import Fields
from draftgate.speculation.recording import (
    is_recording,
    read_recording,
    recorded_phases,
    recorded_requests,
)
from draftgate.speculation.world import Kind, Phase, Requests

__all__ = ["read_phases", "read_requests", "read_table"]

_LOAD = "draftgate-load/1"
_TABLE = "draftgate-table/1"
_ROWS = 100_000
_LONGEST = 256


def read_requests(path: Path) -> Requests:
    """What requests are like: `{"survival": [...]}`, or `{"kinds": [{"share", "rates"}, ...]}`.

    Raises DraftgateError: INVALID_ARGUMENT naming what is wrong, FAILED_PRECONDITION where the file
    cannot be read.
    """
    if is_recording(path):
        return recorded_requests(read_recording(path), str(path))
    found = Fields(str(path), read_object(path))
    found.only("survival", "kinds", "output_tokens")
    output_tokens = found.whole("output_tokens", 1, 1_000_000, 256)
    if "kinds" not in found:
        survival = found.shares("survival")
        for before, value in pairwise(survival):
            if value > before:
                raise invalid_argument(found.name("survival"), value, "falling numbers from 1 to 0")
        return Requests.alike(survival, output_tokens)
    if "survival" in found:
        raise invalid_argument(found.name("survival"), found.shares("survival"), "not with kinds")
    kinds = []
    for each in found.objects("kinds"):
        each.only("share", "rates")
        kinds.append(Kind(each.number("share", 1e-9, 1e9), each.shares("rates")))
    return Requests(kinds, output_tokens)


def read_phases(path: Path) -> Sequence[Phase]:
    """How the load goes on: `{"format": "draftgate-load/1", "phases": [...]}`.

    Raises DraftgateError: INVALID_ARGUMENT naming what is wrong, FAILED_PRECONDITION where the file
    cannot be read.
    """
    if is_recording(path):
        return recorded_phases(read_recording(path))
    found = Fields(str(path), read_object(path))
    found.format(_LOAD)
    found.only("format", "phases")
    return [_phase(each) for each in found.objects("phases")]


def read_table(path: Path) -> dict[int, int]:
    """A draft length from so many rows on: `{"format": "draftgate-table/1", "from_rows": [[1, 3],
    [64, 1]]}`.

    Raises DraftgateError: INVALID_ARGUMENT naming what is wrong, FAILED_PRECONDITION where the file
    cannot be read.
    """
    found = Fields(str(path), read_object(path))
    found.format(_TABLE)
    found.only("format", "from_rows")
    table: dict[int, int] = {}
    for place, pair in enumerate(found.items("from_rows")):
        fits = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        if not fits or not (1 <= pair[0] <= _ROWS and 0 <= pair[1] <= _LONGEST):
            raise invalid_argument(found.name(f"from_rows[{place}]"), pair, "[rows, draft length]")
        table[pair[0]] = pair[1]
    return table


def _phase(found: Fields) -> Phase:
    found.only(
        *("rows", "duration_s", "context_tokens", "prefill_every", "prefill_tokens"),
        *("prefill_steps", "pause_s"),
    )
    every = found.whole("prefill_every", 0, 1_000_000, 0)
    return Phase(
        rows=found.whole("rows", 1, _ROWS),
        duration_s=found.number("duration_s", 1e-6, 1e6),
        context_tokens=found.whole("context_tokens", 0, 10_000_000, 0),
        prefill_every=every,
        prefill_tokens=found.whole("prefill_tokens", 1, 1_000_000, 128),
        prefill_steps=found.whole("prefill_steps", 1, max(every, 1), 1),
        pause_s=found.number("pause_s", 0, 1e6, 0.0),
    )
