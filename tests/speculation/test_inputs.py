"""What a replay is given comes from files that are checked field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation.grids import find_costs, grid_names
from draftgate.speculation.inputs import read_phases, read_requests, read_table
from draftgate.speculation.world import Kind, Phase, Requests


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def test_requests_alike_or_of_kinds(tmp_path: Path) -> None:
    alike = read_requests(written(tmp_path, {"survival": [0.6, 0.3]}))
    assert alike == Requests([Kind(1.0, [0.6, 0.5])], 256)
    kinds = [{"share": 1, "rates": [0.9, 0.8]}, {"share": 3, "rates": [0.2]}]
    found = read_requests(written(tmp_path, {"kinds": kinds, "output_tokens": 64}))
    assert found == Requests([Kind(1.0, [0.9, 0.8]), Kind(3.0, [0.2])], 64)
    assert found.places == 2


def test_a_load_of_phases(tmp_path: Path) -> None:
    phases = [
        {"rows": 8, "duration_s": 10},
        {
            "rows": 2,
            "duration_s": 0.5,
            "context_tokens": 900,
            "prefill_every": 5,
            "prefill_tokens": 64,
            "prefill_steps": 2,
            "pause_s": 1.5,
        },
    ]
    found = read_phases(written(tmp_path, {"format": "draftgate-load/1", "phases": phases}))
    assert found == [Phase(8, 10.0), Phase(2, 0.5, 900, 5, 64, 2, 1.5)]


def test_a_table_by_rows(tmp_path: Path) -> None:
    content = {"format": "draftgate-table/1", "from_rows": [[1, 5], [64, 0]]}
    assert read_table(written(tmp_path, content)) == {1: 5, 64: 0}


def load(**changes: Any) -> dict[str, Any]:
    phase = {"rows": 1, "duration_s": 1.0, **changes}
    return {"format": "draftgate-load/1", "phases": [phase]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"phases": []}, "format: got None, allowed: 'draftgate-load/1'"),
        ({"format": "draftgate-load/1"}, "phases: got None, allowed: a list, not empty"),
        ({"format": "draftgate-load/1", "phases": [3]}, r"phases\[0\]: got 3, allowed: an object"),
        ({**load(), "row": 1}, "row: got 1, allowed: one of format, phases"),
        (load(rows=0), r"phases\[0\].rows: got 0, allowed: an integer 1 to 100000"),
        (load(rows=True), r"rows: got True"),
        (load(duration_s=0), r"duration_s: got 0, allowed: 1e-06 to 1e\+06"),
        (load(duration_s="1"), r"duration_s: got '1', allowed: a number"),
        (load(duration_s=float("nan")), "duration_s: got nan"),
        (load(context=3), r"phases\[0\].context: got 3, allowed: one of rows, duration_s"),
        (load(context_tokens=-1), "context_tokens: got -1"),
        (load(prefill_every=2, prefill_steps=3), "prefill_steps: got 3, allowed: .* 1 to 2"),
        (load(pause_s=-0.5), "pause_s: got -0.5"),
    ],
)
def test_a_wrong_load_is_refused_by_name(tmp_path: Path, raw: object, message: str) -> None:
    path = written(tmp_path, raw)
    with pytest.raises(DraftgateError, match=message) as refused:
        read_phases(path)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(path) in refused.value.message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "survival: got None, allowed: a list, not empty"),
        ({"survival": "high"}, "survival: got 'high', allowed: a list"),
        ({"survival": []}, r"survival: got \[\]"),
        ({"survival": [0.5, 0.6]}, "survival: got 0.6, allowed: falling numbers from 1 to 0"),
        ({"survival": [1.5]}, r"survival\[0\]: got 1.5, allowed: 0 to 1"),
        ({"survival": [True]}, r"survival\[0\]: got True"),
        ({"survival": [0.5], "kinds": [{"share": 1, "rates": [1]}]}, "survival: got .*not with"),
        ({"kinds": [{"share": 0, "rates": [1]}]}, r"kinds\[0\].share: got 0"),
        ({"kinds": [{"share": 1, "rates": []}]}, r"kinds\[0\].rates: got \[\]"),
        ({"kinds": [{"share": 1, "rates": [0.1, -1]}]}, r"kinds\[0\].rates\[1\]: got -1"),
        ({"kinds": [{"share": 1, "rate": [1]}]}, r"kinds\[0\].rate: got \[1\]"),
        ({"survival": [0.5], "output_tokens": 0}, "output_tokens: got 0"),
    ],
)
def test_wrong_acceptance_is_refused_by_name(tmp_path: Path, raw: object, message: str) -> None:
    path = written(tmp_path, raw)
    with pytest.raises(DraftgateError, match=message) as refused:
        read_requests(path)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(path) in refused.value.message


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], r"from_rows: got \[\]"),
        ([[1, 2, 3]], r"from_rows\[0\]: got \[1, 2, 3\], allowed: \[rows, draft length\]"),
        ([[1, 2], [0, 2]], r"from_rows\[1\]: got \[0, 2\]"),
        ([[1, -1]], r"from_rows\[0\]: got \[1, -1\]"),
        ([["1", 1]], r"from_rows\[0\]: got \['1', 1\]"),
        ([3], r"from_rows\[0\]: got 3"),
    ],
)
def test_a_wrong_table_is_refused_by_name(tmp_path: Path, pairs: object, message: str) -> None:
    path = written(tmp_path, {"format": "draftgate-table/1", "from_rows": pairs})
    with pytest.raises(DraftgateError, match=message):
        read_table(path)


@pytest.mark.parametrize("read", [read_phases, read_requests, read_table])
def test_what_is_no_file_or_no_object_is_refused(tmp_path: Path, read: Any) -> None:
    with pytest.raises(DraftgateError, match=r"cannot read .*nowhere"):
        read(tmp_path / "nowhere")
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(DraftgateError, match="is not a JSON object"):
        read(path)
    path.write_text('{"format": \n')
    with pytest.raises(DraftgateError, match="not valid JSON"):
        read(path)


def test_shipped_costs_are_found_by_name_and_files_by_path(tmp_path: Path) -> None:
    assert "llama-3.1-8b-h100" in grid_names()
    for name in grid_names():
        found = find_costs(name)
        assert found.source
        assert found.notes
    published = find_costs("llama-3.1-8b-h100")
    # vLLM's pull request 32374, batch 64 with 3 drafts each.
    assert published.step_ms(3, 256) == 13.4979
    published.save(tmp_path / "mine.json")
    assert find_costs(str(tmp_path / "mine.json")) == published
    with pytest.raises(DraftgateError, match="costs: got 'h100', allowed: a file, or one of llama"):
        find_costs("h100")
