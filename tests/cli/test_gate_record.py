"""`draftgate gate record` as a program, against a scripted gateway."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from tests.fakes.gate_service import End, a_step
from tests.fakes.gateway import FakeGateway
from tests.support.terminal import DRAFTGATE, Terminal, environment, on_terminal, run_in_pipe

WHOLE = {
    "step": 5,
    "time_s": 0.3125,
    "rows": 2,
    "prefill_tokens": 5,
    "kv_tokens": 300,
    "draft_len": 2,
    "reason": "low_acceptance",
    "drafted": 4,
    "accepted": 3,
    "outcomes": [[1, 2, 2], [2, 2, 1]],
    "expected_ms": 44.0,
    "measured_ms": 45.5,
}


def batch(*numbers: int, lost: int = 0) -> pb.WatchStepsResponse:
    return pb.WatchStepsResponse(steps=map(a_step, numbers), lost=lost)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recording(gateway: FakeGateway, out: Path, *more: str) -> list[str]:
    return ["gate", "record", "--out", str(out), "--server", gateway.address, *more]


async def test_a_line_a_step_after_a_header(gateway: FakeGateway, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    bare = a_step(6)
    bare.ClearField("expected_ms")
    bare.ClearField("outcomes")
    gateway.gate.batches.extend([batch(5), pb.WatchStepsResponse(steps=[bare])])
    done = await run_in_pipe(recording(gateway, out, "--steps", "2"))
    assert (done.code, done.out) == (0, "")
    header, first, second = lines(out)
    assert header.pop("recorded_at_s") > 1e9
    assert header == {
        "format": "draftgate-steps/1",
        "model": "fake",
        "quantization": "FP8",
        "compute_dtype": "bfloat16",
        "drafter": "ngram",
        "max_draft_len": 4,
        "max_batch_rows": 8,
    }
    assert first == WHOLE
    assert list(second) == list(WHOLE)
    assert (second["expected_ms"], second["outcomes"]) == (None, [])
    begins, ends = done.err.splitlines()
    assert begins == f"Recording to {out}; Ctrl-C ends it."
    assert re.fullmatch(rf"2 steps in [\d.]+ s, 0 lost: {re.escape(str(out))}", ends)


async def test_lost_steps_have_a_line_where_they_are_missing(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    out = tmp_path / "steps.jsonl"
    gateway.gate.batches.extend([batch(1), batch(12, 13, lost=10)])
    done = await run_in_pipe(recording(gateway, out, "--steps", "3"))
    assert done.code == 0
    _, *rest = lines(out)
    assert [each.get("step", each) for each in rest] == [1, {"lost": 10}, 12, 13]
    assert "3 steps in" in done.err
    assert "10 lost" in done.err


async def test_no_more_than_asked_for(gateway: FakeGateway, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    gateway.gate.batches.extend([batch(1, 2), batch(3, 4, 5, 6)])
    done = await run_in_pipe(recording(gateway, out, "--steps", "4"))
    assert done.code == 0
    assert [each["step"] for each in lines(out)[1:]] == [1, 2, 3, 4]
    await asyncio.wait_for(gateway.gate.cancelled.wait(), 30)


async def test_it_ends_after_the_time(gateway: FakeGateway, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    gateway.gate.batches.append(batch(1))
    done = await run_in_pipe(recording(gateway, out, "--seconds", "0.5"))
    assert done.code == 0
    assert [each["step"] for each in lines(out)[1:]] == [1]
    assert "1 step in" in done.err


async def recorded(terminal: Terminal, out: Path, steps: int) -> None:
    """Wait until the file has so many."""
    await terminal.sees("Recording to")
    async with asyncio.timeout(30):
        while out.read_text().count("\n") <= steps:
            await asyncio.sleep(0.02)


async def test_ctrl_c_is_how_it_ends(gateway: FakeGateway, tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    gateway.gate.batches.append(batch(1, 2, 3))
    async with on_terminal(*recording(gateway, out)) as terminal:
        await recorded(terminal, out, 3)
        terminal.type("\x03")
        assert await terminal.ends() == 0
    assert "3 steps in" in terminal.screen
    assert "Traceback" not in terminal.screen
    assert [each["step"] for each in lines(out)[1:]] == [1, 2, 3]
    await asyncio.wait_for(gateway.gate.cancelled.wait(), 30)


async def test_a_server_that_goes_leaves_what_there_was(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    out = tmp_path / "steps.jsonl"
    gone = End(grpc.StatusCode.UNAVAILABLE, "the engine was restarted")
    gateway.gate.batches.extend([batch(1, 2), gone])
    done = await run_in_pipe(recording(gateway, out))
    assert done.code == 1
    assert [each["step"] for each in lines(out)[1:]] == [1, 2]
    _, summary, error = done.err.splitlines()
    assert summary.startswith("2 steps in")
    assert error == "error: the engine was restarted"


async def test_without_a_server_an_old_recording_stays(tmp_path: Path) -> None:
    out = tmp_path / "steps.jsonl"
    out.write_text("precious")
    done = await run_in_pipe(["gate", "record", "--out", str(out), "--server", "127.0.0.1:1"])
    assert done.code == 1
    assert done.err.startswith("error: no server answers at 127.0.0.1:1")
    assert out.read_text() == "precious"


async def test_a_place_that_cannot_be_written_is_one_line(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    done = await run_in_pipe(recording(gateway, tmp_path / "none" / "steps.jsonl"))
    assert (done.code, done.out) == (1, "")
    assert (
        done.err == f"error: cannot write {tmp_path}/none/steps.jsonl: No such file or directory\n"
    )


async def test_a_full_disk_is_one_line(gateway: FakeGateway) -> None:
    gateway.gate.batches.append(batch(1))
    done = await run_in_pipe(recording(gateway, Path("/dev/full")))
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        "error: /dev/full cannot be written: No space left on device"
    )
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "soon"], "--seconds"),
    ],
)
async def test_wrong_usage_names_the_option(
    gateway: FakeGateway, tmp_path: Path, options: list[str], named: str
) -> None:
    done = await run_in_pipe(recording(gateway, tmp_path / "x", *options))
    assert done.code == 2
    assert named in done.err


async def test_a_file_is_needed() -> None:
    done = await run_in_pipe(["gate", "record"])
    assert done.code == 2
    assert "--out" in done.err


async def test_a_pipe_takes_a_recording_too(gateway: FakeGateway) -> None:
    gateway.gate.batches.extend([batch(n) for n in range(1, 2000)])
    command = [*DRAFTGATE, *recording(gateway, Path("/dev/stdout"))]
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", '"$@" | head -2 | tail -1; echo "${PIPESTATUS[0]}"', "-", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    line, code = out.decode().splitlines()
    assert json.loads(line)["step"] == 1
    assert code == "141"
    assert b"Traceback" not in err
