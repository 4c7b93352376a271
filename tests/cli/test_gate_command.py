"""`draftgate gate`: the textbook's arithmetic, and tables for other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from draftgate.speculation import CostCurve, CostTable
from tests.support.terminal import run_in_pipe


async def test_explain_gives_the_textbooks_numbers() -> None:
    done = await run_in_pipe(
        ["gate", "explain", "--alpha", "0.8", "--k", "4", "--draft-cost", "0.1"]
    )
    assert done.code == 0
    rows = dict(line.split("\t") for line in done.out.splitlines())
    assert rows["expected tokens per pass"] == "3.36"
    assert rows["speedup"] == "2.40x"
    assert float(rows["break-even acceptance"]) == pytest.approx(0.287, abs=0.001)
    assert rows["best draft length"].startswith("6 (2.47x")


async def test_explain_names_what_is_out_of_range() -> None:
    done = await run_in_pipe(
        ["gate", "explain", "--alpha", "1.8", "--k", "4", "--draft-cost", "0.1"]
    )
    assert done.code == 1
    assert "alpha: got 1.8, allowed: 0 to 1" in done.err


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A table of costs, and acceptance."""
    costs, acceptance = tmp_path / "costs.json", tmp_path / "acceptance.json"
    curves = {k: CostCurve((1, 512), (10.0 + k, 60.0 + k)) for k in (0, 1, 3)}
    CostTable(curves).save(costs)
    acceptance.write_text(json.dumps({"survival": [0.7, 0.5, 0.3]}))
    return costs, acceptance


async def test_compile_writes_another_engines_configuration(files: tuple[Path, Path]) -> None:
    costs, acceptance = files
    done = await run_in_pipe(
        [
            *("gate", "compile", "--costs", str(costs), "--acceptance", str(acceptance)),
            *("--target", "vllm", "--max-batch-size", "64"),
        ]
    )
    assert done.code == 0
    config = yaml.safe_load(done.out)["speculative_config"]
    assert config["num_speculative_tokens"] == 3
    rows = config["num_speculative_tokens_per_batch_size"]
    assert (rows[0][0], rows[0][2], rows[-1][1]) == (1, 3, 64)
    lens = [row[2] for row in rows]
    assert lens == sorted(lens, reverse=True)
    assert "# Expected tokens/s over no speculation, by batch size:" in done.out


async def test_compile_takes_kinds_of_requests_and_a_shipped_table(
    files: tuple[Path, Path],
) -> None:
    _, acceptance = files
    kinds = [{"share": 1, "rates": [0.9, 0.8, 0.8]}, {"share": 1, "rates": [0.4, 0.3, 0.3]}]
    acceptance.write_text(json.dumps({"kinds": kinds}))
    done = await run_in_pipe(
        [
            *("gate", "compile", "--costs", "llama-3.1-8b-h100", "--acceptance", str(acceptance)),
            *("--target", "vllm", "--max-batch-size", "256"),
        ]
    )
    assert done.code == 0, done.err
    config = yaml.safe_load(done.out)["speculative_config"]
    rows = config["num_speculative_tokens_per_batch_size"]
    assert (rows[0][2], rows[-1]) == (3, [rows[-1][0], 256, 0])


@pytest.mark.parametrize(
    ("survival", "message"),
    [
        ("high", "survival: got 'high', allowed: a list, not empty"),
        ([0.5, 0.6], "survival: got 0.6, allowed: falling numbers from 1 to 0"),
        ([1.5], "survival[0]: got 1.5, allowed: 0 to 1"),
        ([], "survival: got []"),
    ],
)
async def test_compile_names_what_is_wrong_with_a_file(
    files: tuple[Path, Path], survival: object, message: str
) -> None:
    costs, acceptance = files
    acceptance.write_text(json.dumps({"survival": survival}))
    done = await run_in_pipe(
        [
            *("gate", "compile", "--costs", str(costs), "--acceptance", str(acceptance)),
            *("--target", "vllm"),
        ]
    )
    assert done.code == 1
    assert message in done.err
