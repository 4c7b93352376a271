"""`draftgate gate state`, `watch` and `set` as programs, against a scripted gateway."""

from __future__ import annotations

import asyncio
import json
import signal

import grpc
import pytest

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2
from tests.fakes.gate_service import End, a_state
from tests.fakes.gateway import FakeGateway
from tests.support.terminal import DRAFTGATE, environment, on_terminal, run_in_pipe


def rows(out: str) -> dict[str, str]:
    return dict(line.split("\t") for line in out.splitlines())


# state


async def test_a_pipe_gets_a_row_for_each_thing(gateway: FakeGateway) -> None:
    done = await run_in_pipe(["gate", "state", "--server", gateway.address])
    assert (done.code, done.err) == (0, "")
    assert rows(done.out) == {
        "policy": "auto, max_step_ms 60",
        "last draft length": "2 (gain)",
        "rows": "3 running, 1 waiting",
        "KV cache": "1,024 of 4,096 tokens",
        "last step time": "45.5 ms, expected 44.0 ms",
        "expected speedup": "1.42x",
        "steps": "1,200, the draft length changed 4 times",
        "tokens": "4,000 in 12 min",
        "drafts accepted": "1,100 of 2,000",
        "acceptance by place, eagle": "0.68 0.61 0.50",
        "acceptance by place, ngram": "0.83 0.75 0.70",
        "draft length 0": "3.00 tokens in 38.0 ms",
        "draft length 2": "5.50 tokens in 44.0 ms",
        "steps, gain": "1,100",
        "steps, dwell": "100",
        "step times from": "some CPU; fake; ngram, 2 min old",
        "corrected from 6 tokens with drafts": "x 1.07 (20 steps)",
    }


async def test_what_the_server_does_not_say_is_not_made_up(gateway: FakeGateway) -> None:
    gateway.gate.state = pb.GateState(
        policy=pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=0, max_tpot_ms=12.5),
        reason=generation_pb2.GateReason.ValueType(77),
        measured_step_ms=30.0,
        steps=9,
    )
    done = await run_in_pipe(["gate", "state", "--server", gateway.address])
    found = rows(done.out)
    assert found["policy"] == "fixed, draft_len 0, max_tpot_ms 12.5"
    assert found["last draft length"] == "0 (reason_77)"
    assert found["last step time"] == "30.0 ms, expected - ms"
    assert not {"expected speedup", "step times from"} & found.keys()


async def test_a_server_that_has_run_no_step_has_no_last_one(gateway: FakeGateway) -> None:
    gateway.gate.state = pb.GateState(policy=pb.GatePolicy(mode=pb.GATE_MODE_AUTO), uptime_s=3.0)
    done = await run_in_pipe(["gate", "state", "--server", gateway.address])
    assert rows(done.out) == {
        "policy": "auto",
        "rows": "0 running, 0 waiting",
        "KV cache": "0 of 0 tokens",
        "steps": "0, the draft length changed 0 times",
        "tokens": "0 in 3 s",
        "drafts accepted": "0 of 0",
    }


async def test_json_has_the_names_of_the_api_and_no_gaps(gateway: FakeGateway) -> None:
    gateway.gate.state.waiting_rows = 0
    done = await run_in_pipe(["gate", "state", "--json", "--server", gateway.address])
    found = json.loads(done.out)
    assert found["waiting_rows"] == 0
    assert found["reason"] == "GATE_REASON_GAIN"
    assert found["policy"] == {"mode": "GATE_MODE_AUTO", "max_step_ms": 60.0}
    assert found.keys() == set(pb.GateState.DESCRIPTOR.fields_by_name)


async def test_a_terminal_gets_a_table_that_cannot_command_it(gateway: FakeGateway) -> None:
    gateway.gate.state.costs.source = "a\x1b]0;owned\x07b"
    async with on_terminal("gate", "state", "--server", gateway.address) as terminal:
        assert await terminal.ends() == 0
    assert "3 running, 1 waiting" in terminal.screen
    assert "\x1b]0;" not in terminal.screen


@pytest.mark.parametrize(
    "command", [["gate", "state"], ["gate", "watch"], ["gate", "set", "--mode", "off"], ["top"]]
)
async def test_no_server_says_how_to_start_one(command: list[str]) -> None:
    done = await run_in_pipe([*command, "--server", "127.0.0.1:1"])
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: no server answers at 127.0.0.1:1: start one with")
    assert done.err.count("\n") == 1


# watch


async def test_a_watch_writes_a_line_a_state_until_the_server_goes(gateway: FakeGateway) -> None:
    gateway.gate.states = [
        a_state(),
        a_state(draft_len=4, reason=generation_pb2.GATE_REASON_PROBE, running_rows=32),
        End(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"),
    ]
    done = await run_in_pipe(["gate", "watch", "--server", gateway.address, "--interval-ms", "250"])
    assert done.code == 1
    assert gateway.gate.intervals_ms == [250]
    assert done.out.splitlines() == [
        "rows   3 + 1    K 2 gain            step    45.5 ms, expected    44.0  speedup 1.42x",
        "rows  32 + 1    K 4 probe           step    45.5 ms, expected    44.0  speedup 1.42x",
    ]
    assert done.err == "error: the server is shutting down\n"


async def test_a_watch_in_json_is_a_line_a_state(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), a_state(), End(grpc.StatusCode.UNAVAILABLE, "gone")]
    done = await run_in_pipe(["gate", "watch", "--json", "--server", gateway.address])
    assert [json.loads(line)["steps"] for line in done.out.splitlines()] == ["1200", "1200"]


async def test_an_interval_out_of_range_is_the_servers_to_refuse(gateway: FakeGateway) -> None:
    done = await run_in_pipe(["gate", "watch", "--server", gateway.address, "--interval-ms", "7"])
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: interval_ms: got 7, allowed: an integer 50 to 60000\n"


async def test_ctrl_c_is_how_a_watch_ends(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state()]
    async with on_terminal("gate", "watch", "--server", gateway.address) as terminal:
        await terminal.sees("K 2 gain")
        terminal.type("\x03")
        assert await terminal.ends() == 0
    await asyncio.wait_for(gateway.gate.cancelled.wait(), 30)
    assert "Traceback" not in terminal.screen


async def test_a_reader_that_goes_away_ends_a_watch_quietly(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state()] * 20_000
    command = [*DRAFTGATE, "gate", "watch", "--server", gateway.address]
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", '"$@" | head -1; echo "${PIPESTATUS[0]}"', "-", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    line, code = out.decode().splitlines()
    assert line.startswith("rows ")
    assert (code, err) == ("141", b"")


# set


async def test_what_is_not_named_stays_as_it_is(gateway: FakeGateway) -> None:
    done = await run_in_pipe(["gate", "set", "--mode", "off", "--server", gateway.address])
    assert done.code == 0
    assert rows(done.out) == {"was": "auto, max_step_ms 60", "is": "off, max_step_ms 60"}
    assert done.err == "Until the server's next start; --save keeps it.\n"
    (request,) = gateway.gate.set
    assert request == pb.SetPolicyRequest(
        policy=pb.GatePolicy(mode=pb.GATE_MODE_OFF, max_step_ms=60.0)
    )


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        (
            pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_step_ms=60.0),
            "--mode fixed --draft-len 3",
            pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=3, max_step_ms=60.0),
        ),
        (
            pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=3, max_draft_len=4),
            "--draft-len 0 --max-tpot-ms 20.5",
            pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=0, max_draft_len=4, max_tpot_ms=20.5),
        ),
        (
            pb.GatePolicy(mode=pb.GATE_MODE_FIXED, draft_len=3, max_draft_len=4, max_step_ms=9.0),
            "--mode auto --max-draft-len none --max-step-ms 33",
            pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_step_ms=33.0),
        ),
        (
            pb.GatePolicy(mode=pb.GATE_MODE_OFF, max_step_ms=1.0, max_tpot_ms=2.0),
            "--max-step-ms none --max-tpot-ms none --max-draft-len 2",
            pb.GatePolicy(mode=pb.GATE_MODE_OFF, max_draft_len=2),
        ),
    ],
)
async def test_each_field_can_be_changed_alone(
    gateway: FakeGateway, before: pb.GatePolicy, options: str, after: pb.GatePolicy
) -> None:
    gateway.gate.state.policy.CopyFrom(before)
    done = await run_in_pipe(["gate", "set", *options.split(), "--server", gateway.address])
    assert done.code == 0, done.err
    assert gateway.gate.state.policy == after


async def test_the_present_policy_can_be_saved(gateway: FakeGateway) -> None:
    done = await run_in_pipe(["gate", "set", "--save", "--server", gateway.address])
    assert (done.code, done.err) == (0, "")
    (request,) = gateway.gate.set
    assert request.save
    assert request.policy == pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_step_ms=60.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "name what to change"),
        ("--mode on", "--mode"),
        ("--mode fixed", "needs --draft-len"),
        ("--draft-len 2", "goes with --mode fixed"),
        ("--mode off --draft-len 2", "goes with --mode fixed"),
        ("--mode fixed --draft-len 99999999999", "--draft-len"),
        ("--max-draft-len 1.5", "'1.5' is neither a number nor none"),
        ("--max-draft-len 99999999999", "--max-draft-len"),
        ("--max-step-ms fast", "'fast' is neither a number nor none"),
        ("--max-tpot-ms None", "'None' is neither a number nor none"),
    ],
)
async def test_wrong_usage_changes_nothing(gateway: FakeGateway, options: str, named: str) -> None:
    done = await run_in_pipe(["gate", "set", *options.split(), "--server", gateway.address])
    assert (done.code, done.out) == (2, "")
    assert named in " ".join(done.err.replace("│", " ").split())
    assert gateway.gate.set == []


async def test_the_servers_own_words_are_the_error(gateway: FakeGateway) -> None:
    message = "policy.max_step_ms: got 0.0, allowed: a time above 0, in ms"
    gateway.gate.refusal = End(grpc.StatusCode.INVALID_ARGUMENT, message)
    done = await run_in_pipe(["gate", "set", "--max-step-ms", "0", "--server", gateway.address])
    assert (done.code, done.out, done.err) == (1, "", f"error: {message}\n")


async def test_an_interrupt_while_the_server_is_silent(gateway: FakeGateway) -> None:
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "gate", "watch", "--server", gateway.address,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    while not gateway.gate.intervals_ms:
        await asyncio.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    assert (process.returncode, out, err) == (0, b"", b"")
