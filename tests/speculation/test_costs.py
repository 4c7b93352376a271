"""Cost tables: lines between points, cliffs that stay, files that are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.speculation import CostCurve, CostTable

TABLE = CostTable(
    {
        0: CostCurve((1, 8, 256, 257, 512), (10.0, 11.0, 20.0, 34.0, 40.0), 0.039),
        2: CostCurve((3, 24), (12.0, 15.0)),
    },
    source="a machine",
    measured_at_s=1.5e9,
    notes={"gpu": "H100"},
)


def test_between_points_lies_a_line_and_a_cliff_stays() -> None:
    assert TABLE.step_ms(0, 8) == 11.0
    assert TABLE.step_ms(0, 132) == pytest.approx(15.5)
    assert TABLE.step_ms(0, 256) == 20.0
    assert TABLE.step_ms(0, 257) == 34.0
    assert TABLE.step_ms(0, 768) == pytest.approx(40 + 256 * 6 / 255)
    assert TABLE.step_ms(2, 1) == 12.0
    assert TABLE.step_ms(2, 45) == 18.0


def test_context_is_counted() -> None:
    assert TABLE.step_ms(0, 8, 100_000) == pytest.approx(11.0 + 3.9)
    assert TABLE.step_ms(2, 24, 100_000) == 15.0


def test_a_single_point_holds_everywhere_and_beyond_the_last_no_line_falls() -> None:
    table = CostTable({0: CostCurve((4,), (7.0,)), 1: CostCurve((2, 4), (9.0, 8.0))})
    assert [table.step_ms(0, tokens) for tokens in (1, 4, 100)] == [7.0, 7.0, 7.0]
    assert [table.step_ms(1, tokens) for tokens in (1, 3, 100)] == [9.0, 8.5, 8.0]
    assert table.grown().curves[1].times_ms == (9.0, 9.0)


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=8),
    st.integers(1, 3000),
    st.integers(1, 3000),
)
def test_a_grown_table_never_falls(times: list[float], one: int, other: int) -> None:
    tokens = tuple(2**i for i in range(len(times)))
    table = CostTable({0: CostCurve(tokens, tuple(times))}).grown()
    low, high = sorted((one, other))
    assert table.step_ms(0, low) <= table.step_ms(0, high) + 1e-9


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    TABLE.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_scaling_scales_context_too() -> None:
    twice = TABLE.scaled(2.0)
    assert twice.step_ms(0, 132, 1000) == pytest.approx(2 * TABLE.step_ms(0, 132, 1000))


def changed(**changes: Any) -> dict[str, Any]:
    curve = {"draft_len": 0, "tokens": [1, 2], "ms": [1.0, 2.0], "kv_us": 0.0}
    raw: dict[str, Any] = {"format": "draftgate-costs/1", "curves": [curve]}
    raw.update({key: value for key, value in changes.items() if key in ("format", "curves")})
    curve.update({key: value for key, value in changes.items() if key in curve})
    return raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (changed(format="x"), "format: got 'x'"),
        (changed(curves=3), "curves: got 3"),
        (changed(curves=[3]), r"curves\[0\]: got 3"),
        (changed(curves=[]), "costs: got .., allowed: draft lengths with 0 among them"),
        (changed(draft_len=1), r"costs: got \[1\]"),
        (changed(draft_len=-1), "costs: got"),
        (changed(draft_len="x"), r"curves\[0\].draft_len: got 'x'"),
        (changed(tokens=[]), r"costs\[0\]: got 0"),
        (changed(tokens=[1]), r"costs\[0\]: got 1"),
        (changed(tokens=[2, 2]), r"costs\[0\].tokens: got \[2, 2\], allowed: rising"),
        (changed(tokens=[0, 2]), r"costs\[0\].tokens: got 0"),
        (changed(tokens=[1, 2.5]), r"tokens: got 2.5, allowed: whole numbers"),
        (changed(tokens=[1, True]), r"tokens: got True"),
        (changed(ms=[1.0, 0.0]), r"costs\[0\].ms: got"),
        (changed(ms=[1.0, float("inf")]), r"costs\[0\].ms: got"),
        (changed(ms="fast"), r"curves\[0\].ms: got 'fast'"),
        (changed(kv_us=-1), r"costs\[0\].kv_us: got -1"),
        (changed(kv_us=float("nan")), r"costs\[0\].kv_us: got nan"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, raw: Any, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(DraftgateError, match=message) as refused:
        CostTable.load(path)
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert str(path) in refused.value.message


def test_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftgateError, match="nowhere") as refused:
        CostTable.load(tmp_path / "nowhere")
    assert refused.value.code is ErrorCode.FAILED_PRECONDITION
