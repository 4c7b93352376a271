"""A recording of a live server's steps is a load, and tells of acceptance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.errors import DraftgateError
from draftgate.speculation.inputs import read_phases, read_requests
from draftgate.speculation.world import Phase

HEADER = {"format": "draftgate-steps/1", "model": "a model"}


def step(rows: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "time_s": 0.5,
        "rows": rows,
        "prefill_tokens": 0,
        "kv_tokens": 100 * rows,
        "draft_len": 2,
        "reason": "gain",
        "drafted": 0,
        "accepted": 0,
        "outcomes": [],
        "expected_ms": None,
        "measured_ms": 20.0,
        **changes,
    }


def recording(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *lines)))
    return path


def test_steps_with_as_many_rows_are_a_phase(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        *[step(2, prefill_tokens=64 * (i % 5 == 0)) for i in range(10)],
        step(0, prefill_tokens=200),
        {"lost": 12},
        *[step(3, kv_tokens=1000)] * 4,
        step(2),
    )
    assert read_phases(path) == [
        Phase(2, pytest.approx(0.2), 100, 5, 64),
        Phase(3, pytest.approx(0.08), 333, 0, 0),
        Phase(2, pytest.approx(0.02), 100, 0, 0),
    ]


def test_acceptance_is_that_of_all_drafts_by_place(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        step(3, outcomes=[[1, 3, 3], [1, 3, 1], [2, 1, 0]]),
        step(3, outcomes=[[1, 3, 0]]),
    )
    # Four drafts reached the first place, two the second, one the third.
    found = read_requests(path)
    [kind] = found.kinds
    assert kind.rates == pytest.approx([2 / 4, 1 / 2, 1.0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (step(-1), "line 3.rows: got -1"),
        (step(1, kv_tokens=1.5), "line 3.kv_tokens: got 1.5"),
        (step(1, measured_ms=None), "line 3.measured_ms: got None, allowed: a number"),
        (step(1, outcomes=[[1, 2]]), r"line 3.outcomes\[0\]: got \[1, 2\]"),
        (step(1, outcomes=[[1, 2, 3]]), r"outcomes\[0\]: got \[1, 2, 3\]"),
        (
            step(1, outcomes=["x"]),
            r"outcomes\[0\]: got 'x', allowed: \[source, drafted, accepted\]",
        ),
        (step(1, outcomes=None), "outcomes: got None, allowed: a list"),
        ([1], r"line 3: got \[1\], allowed: an object"),
    ],
)
def test_a_wrong_line_is_refused_by_number(tmp_path: Path, line: object, message: str) -> None:
    path = recording(tmp_path, step(1), line)
    with pytest.raises(DraftgateError, match=message) as refused:
        read_phases(path)
    assert str(path) in refused.value.message


def test_a_cut_off_line_is_refused(tmp_path: Path) -> None:
    path = recording(tmp_path, step(1))
    path.write_text(path.read_text() + '{"step": 2, "ti')
    with pytest.raises(DraftgateError, match=r"line 3: got '\{\"step\": 2, \"ti'"):
        read_phases(path)


def test_a_recording_has_to_hold_what_is_asked_of_it(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="steps: got 0, allowed: at least one"):
        read_phases(recording(tmp_path, step(0)))
    with pytest.raises(DraftgateError, match="drafted: got 0, allowed: some drafted tokens"):
        read_requests(recording(tmp_path, step(4)))
