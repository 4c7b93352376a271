"""`draftgate gate replay` runs laws over files, and names what is wrong with one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from draftgate.speculation import CostCurve, CostTable
from tests.support.terminal import Finished, run_in_pipe


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What a replay needs."""
    found = {name: tmp_path / f"{name}.json" for name in ("costs", "acceptance", "load", "table")}
    curves = {k: CostCurve((1, 512), (10.0 + k, 90.0 + k)) for k in (0, 1, 3)}
    CostTable(curves).save(found["costs"])
    kinds = [{"share": 1, "rates": [0.9, 0.8]}, {"share": 1, "rates": [0.3]}]
    found["acceptance"].write_text(json.dumps({"kinds": kinds}))
    phases = [{"rows": rows, "duration_s": 2} for rows in (2, 100)]
    found["load"].write_text(json.dumps({"format": "draftgate-load/1", "phases": phases}))
    table = {"format": "draftgate-table/1", "from_rows": [[1, 3], [50, 0]]}
    found["table"].write_text(json.dumps(table))
    return found


async def run(files: dict[str, Path], *more: str) -> Finished:
    given = [("--costs", "costs"), ("--acceptance", "acceptance"), ("--load", "load")]
    options = [part for option, name in given for part in (option, str(files[name]))]
    return await run_in_pipe(["gate", "replay", *options, *more])


def columns(done: Finished) -> dict[str, list[str]]:
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    return {" ".join(word for word in line if not word[0].isdigit()): line for line in lines}


async def test_it_says_what_each_law_brings_by_phase(files: dict[str, Path]) -> None:
    names = ("auto", "off", "fixed:3", f"table:{files['table']}", "ema", "goodput")
    done = await run(files, *(part for name in names for part in ("--law", name)))
    found = columns(done)
    assert done.out.splitlines()[0].split() == ["rows", "2", "100", "all", "switches"]
    speeds = {name: [int(part) for part in found[name][1:]] for name in names}
    assert set(map(len, speeds.values())) == {4}
    off, long, table = speeds["off"], speeds["fixed:3"], speeds[names[3]]
    assert off[3] == long[3] == 0
    assert table[3] == 1
    assert table[0] == pytest.approx(long[0], rel=0.05)
    assert table[1] == pytest.approx(off[1], rel=0.05)
    assert off[0] < long[0]
    assert long[1] < off[1]
    best = [int(part) for part in found["best fixed"][2:]]
    assert best[:2] == [max(off[0], long[0], best[0]), max(off[1], long[1], best[1])]
    assert found["its K"] == ["its", "K", "3", "0"]
    assert speeds["auto"][2] > 0.95 * best[2]


async def test_the_laws_are_auto_and_off_unless_told(files: dict[str, Path]) -> None:
    done = await run(files)
    assert [line.split()[0] for line in done.out.splitlines()] == [
        *("rows", "auto", "off", "best", "its")
    ]
    again = await run(files)
    assert again.out == done.out
    other = await run(files, "--seed", "1")
    assert other.out != done.out


async def test_many_phases_are_shown_by_rows(files: dict[str, Path]) -> None:
    phases = [{"rows": 1 + i % 3, "duration_s": 0.2} for i in range(30)]
    files["load"].write_text(json.dumps({"format": "draftgate-load/1", "phases": phases}))
    done = await run(files, "--law", "off")
    assert done.out.splitlines()[0].split() == ["rows", "1", "2", "3", "all", "switches"]
    assert "its K" not in done.out


async def test_a_recording_serves_as_load_and_acceptance(
    files: dict[str, Path], tmp_path: Path
) -> None:
    step = {
        "step": 1,
        "time_s": 0.5,
        "rows": 4,
        "prefill_tokens": 0,
        "kv_tokens": 400,
        "draft_len": 2,
        "reason": "gain",
        "drafted": 8,
        "accepted": 4,
        "outcomes": [[1, 2, 1]] * 4,
        "expected_ms": None,
        "measured_ms": 20.0,
    }
    path = tmp_path / "steps.jsonl"
    lines = [{"format": "draftgate-steps/1"}, *[step] * 50, *[{**step, "rows": 9}] * 50]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files["load"] = files["acceptance"] = path
    done = await run(files, "--law", "fixed:1")
    assert done.out.splitlines()[0].split() == ["rows", "4", "9", "all", "switches"]


async def test_costs_may_be_a_shipped_table(files: dict[str, Path]) -> None:
    files["costs"] = Path("llama-3.1-8b-h100")
    found = columns(await run(files, "--law", "off"))
    # Two rows without drafts at 6.55 ms a step.
    assert int(found["off"][1]) == pytest.approx(2 / 6.55e-3, rel=0.02)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ("fast", "law: got 'fast', allowed: auto, off, fixed:K, table:FILE, ema or goodput"),
        ("fixed", "law: got 'fixed'"),
        ("fixed:2", "law: got 'fixed:2', allowed: fixed:K with K in 0, 1, 3"),
        ("fixed:x", "law: got 'fixed:x'"),
        ("table:nowhere.json", "cannot read nowhere.json: No such file"),
    ],
)
async def test_a_law_that_is_none_is_named(files: dict[str, Path], law: str, message: str) -> None:
    done = await run(files, "--law", law)
    assert done.code == 1
    assert message in done.err


async def test_a_table_has_to_fit_the_costs(files: dict[str, Path]) -> None:
    table = {"format": "draftgate-table/1", "from_rows": [[1, 4]]}
    files["table"].write_text(json.dumps(table))
    done = await run(files, "--law", f"table:{files['table']}")
    assert done.code == 1
    assert "from_rows: got 4, allowed: draft lengths that costs has: 0, 1, 3" in done.err


async def test_a_wrong_file_is_named(files: dict[str, Path]) -> None:
    files["load"].write_text('{"format": "draftgate-load/1", "phases": [{"rows": 0}]}')
    done = await run(files)
    assert done.code == 1
    assert f"{files['load']}: phases[0].rows: got 0, allowed: an integer 1 to" in done.err


async def test_it_draws(files: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = await run(files, "--png", str(tmp_path / "replay.png"))
    assert done.code == 0, done.err
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    done = await run(files, "--png", str(tmp_path / "nowhere" / "replay.png"))
    assert done.code == 1
    assert "cannot write" in done.err


async def test_without_matplotlib_it_says_how_to_get_it(
    files: dict[str, Path], tmp_path: Path
) -> None:
    # A module that shadows it and cannot be imported.
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    given = ["--costs", str(files["costs"]), "--acceptance", str(files["acceptance"])]
    done = await run_in_pipe(
        ["gate", "replay", *given, "--load", str(files["load"]), "--png", str(tmp_path / "a.png")],
        env={"PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
    )
    assert done.code == 1
    assert "pip install 'draftgate[plot]'" in done.err
    # The numbers are not lost.
    assert "best fixed" in done.out
