"""`draftgate top`: its frames, and as a program against a scripted gateway."""

from __future__ import annotations

import asyncio
import io
import re

import grpc
import pytest
from rich.cells import cell_len
from rich.console import Console

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2
from draftgate._pb.draftgate.v1.model_pb2 import Model
from draftgate.cli.top_view import frame
from tests.fakes.gate_service import End, a_state
from tests.fakes.gateway import MODEL, FakeGateway
from tests.support.terminal import on_terminal, run_in_pipe


def shown(before: pb.GateState | None, now: pb.GateState, *, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(MODEL, before, now))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def later() -> pb.GateState:
    """Two seconds after `a_state`: 40 steps, half of them probes."""
    state = a_state()
    state.uptime_s += 2.0
    state.steps += 40
    state.emitted_tokens += 250
    state.verify_steps += 60
    state.drafted_tokens += 120
    state.accepted_tokens += 90
    state.reasons[0].steps += 30
    state.reasons.add(reason=generation_pb2.GATE_REASON_PROBE, steps=10)
    return state


def row(text: str, name: str) -> str:
    (found,) = re.findall(rf"^{name} +(.*?) *$", text, re.M)
    return str(found)


def test_a_frame_says_what_happens() -> None:
    text = shown(a_state(), later())
    assert "fake (bfloat16; ngram, up to 4) · up 12 min" in text
    assert row(text, "rows") == "3 of 8 running, 1 waiting"
    assert row(text, "KV cache") == "██░░░░░░░░ 25% of 4,096 tokens"
    assert row(text, "speed") == "125.0 tokens/s, 20.0 steps/s over 2.0 s"
    assert row(text, "drafts") == "K 2, gain"
    assert row(text, "step time") == "45.5 ms, predicted 44.0 ms (+3%)"
    assert row(text, "speedup") == "1.42x predicted over no drafts"
    assert row(text, "accepted") == "75% of drafts, 2.50 tokens a pass"
    assert row(text, "policy") == "auto, max_step_ms 60"
    assert row(text, "step times") == "some CPU; fake; ngram, 2 min old"
    assert re.search(r"eagle +0\.68 +0\.61 +0\.50", text)
    assert re.search(r"ngram +0\.83 +0\.75 +0\.70", text)
    assert re.search(r"2 +5\.50 +44\.0 +125\.0", text)
    assert "reasons, 2.0 s" in text
    assert re.search(r"gain +████████░░ +75%", text)
    assert re.search(r"probe +██░░░░░░░░ +25%", text)
    assert "dwell" not in text
    assert re.search(r"6 +with +1\.07", text)


def test_the_first_frame_has_no_rates() -> None:
    text = shown(None, a_state())
    assert row(text, "speed") == "-"
    assert row(text, "accepted") == "55% of drafts, 2.10 tokens a pass since the start"
    assert "reasons, since the start" in text
    assert re.search(r"dwell +█░░░░░░░░░ +8%", text)


def test_an_engine_that_was_restarted_has_no_rates_either() -> None:
    now = later()
    now.uptime_s, now.emitted_tokens, now.steps = 3.0, 7, 2
    assert row(shown(a_state(), now), "speed") == "-"
    # Up for longer than before, and yet not the same: its numbers fell.
    now.uptime_s = 900.0
    assert row(shown(a_state(), now), "speed") == "-"


def test_an_idle_server_says_so() -> None:
    now = later()
    now.running_rows = now.waiting_rows = 0
    assert row(shown(a_state(), now), "drafts") == "idle; last: K 2, gain"


def test_a_server_that_has_done_nothing_yet() -> None:
    text = shown(None, pb.GateState(policy=pb.GatePolicy(mode=pb.GATE_MODE_OFF), uptime_s=4.0))
    assert row(text, "KV cache") == "░░░░░░░░░░ 0% of 0 tokens"
    assert row(text, "drafts") == "-"
    assert row(text, "step time") == "-"
    assert row(text, "accepted") == "nothing drafted"
    assert row(text, "policy") == "off"
    assert "step times" not in text
    assert "reasons" not in text


@pytest.mark.parametrize("width", [20, 32, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    now = later()
    now.costs.corrections.extend(
        pb.GateCorrection(tokens=n, ratio=1.0, observations=n) for n in range(1, 90)
    )
    now.acceptance[0].rates.extend([0.5] * 60)
    text = shown(a_state(), now, width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    assert len(text.splitlines()) <= 3 * 50
    for part in ("auto", "gain", "45.5", "125.0"):
        assert part in text


def test_a_frame_cannot_command_the_terminal() -> None:
    now = later()
    now.costs.source = "a\x1b]0;owned\x07[bold]b"
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    model = Model(name="m\x1b[2J", max_batch_rows=8)
    console.print(frame(model, None, now))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert "a]0;owned[bold]b" in text


# The program


async def test_a_pipe_gets_one_frame_of_one_interval(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), later()]
    done = await run_in_pipe(["top", "--server", gateway.address, "--interval-ms", "2000"])
    assert (done.code, done.err) == (0, "")
    assert gateway.gate.intervals_ms == [2000]
    assert done.out.count("draftgate top") == 1
    assert row(done.out, "speed") == "125.0 tokens/s, 20.0 steps/s over 2.0 s"
    assert "\x1b" not in done.out
    await asyncio.wait_for(gateway.gate.cancelled.wait(), 30)


async def test_once_is_once_on_a_terminal_too(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), later()]
    async with on_terminal("top", "--once", "--server", gateway.address) as terminal:
        assert await terminal.ends() == 0
    assert terminal.screen.count("draftgate top") == 1
    assert "\x1b[?1049h" not in terminal.screen


async def test_a_terminal_is_drawn_again_and_given_back(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), later()]
    async with on_terminal("top", "--server", gateway.address) as terminal:
        await terminal.sees("125.0 tokens/s")
        terminal.type("\x03")
        assert await terminal.ends() == 0
    entered, left = (terminal.screen.index(f"\x1b[?1049{way}") for way in "hl")
    assert entered < terminal.screen.index("125.0 tokens/s") < left
    # The cursor is back, and the latest frame stays.
    assert terminal.screen.rindex("\x1b[?25h") > terminal.screen.rindex("\x1b[?25l")
    assert "125.0 tokens/s" in terminal.screen[left:]
    assert "Traceback" not in terminal.screen
    await asyncio.wait_for(gateway.gate.cancelled.wait(), 30)


async def test_a_server_that_goes_is_one_line_after_the_last_frame(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), End(grpc.StatusCode.UNAVAILABLE, "the server shuts down")]
    async with on_terminal("top", "--server", gateway.address) as terminal:
        assert await terminal.ends() == 1
    after = terminal.screen[terminal.screen.index("\x1b[?1049l") :]
    assert "3 of 8 running" in after
    assert "error: the server shuts down" in after.splitlines()[-1]


async def test_a_server_that_is_killed_is_named(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state()]
    async with on_terminal("top", "--server", gateway.address) as terminal:
        await terminal.sees("3 of 8 running")
        await gateway.stop()
        assert await terminal.ends() == 1
    assert "Traceback" not in terminal.screen
    assert terminal.screen.splitlines()[-1].startswith("\x1b[31merror: ")


async def test_an_interval_out_of_range_is_the_servers_to_refuse(gateway: FakeGateway) -> None:
    done = await run_in_pipe(["top", "--server", gateway.address, "--interval-ms", "7"])
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: interval_ms: got 7, allowed: an integer 50 to 60000\n"


async def test_a_terminal_that_can_do_nothing_gets_one_frame(gateway: FakeGateway) -> None:
    gateway.gate.states = [a_state(), later()]
    async with on_terminal("top", "--server", gateway.address, env={"TERM": "dumb"}) as terminal:
        assert await terminal.ends() == 0
    assert terminal.screen.count("draftgate top") == 1
    assert "\x1b" not in terminal.screen
