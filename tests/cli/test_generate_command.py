"""`draftgate generate` as a program, against a scripted gateway."""

from __future__ import annotations

import asyncio
import re
import signal
import socket

import grpc
import pytest

from draftgate._pb.draftgate.v1.generation_pb2 import FINISH_REASON_CANCELLED, VERIFICATION_COUPLED
from tests.fakes.gateway import (
    Fail,
    FakeGateway,
    Hang,
    Step,
    finished,
    started,
    target,
    verified,
)
from tests.support.terminal import DRAFTGATE, environment, on_terminal, run_in_pipe

GREEN, AMBER, STRUCK, RESET = "\x1b[32m", "\x1b[33m", "\x1b[31m\x1b[9m", "\x1b[0m"

SPECULATED: list[Step] = [
    started(),
    target("The"),
    verified([" sky", " is"], [" green", "\n"], " blue"),
    finished(steps=1, drafted=4, accepted=2),
]


async def test_a_pipe_gets_the_text_alone(gateway: FakeGateway) -> None:
    gateway.scripts.append(SPECULATED)
    done = await run_in_pipe(
        ["generate", "Why?", "--server", gateway.address, "--show-speculation", "--show-rejected"]
    )
    assert (done.code, done.out) == (0, "The sky is blue\n")
    assert "\x1b" not in done.err
    assert re.fullmatch(
        r"4 tokens · TTFT \d+ ms · [\d.]+ tokens/s · 1 verify step · acceptance 50% \(2/4\)"
        r" · acceptance length 3\.00 · ended by eos\n",
        done.err,
    )


async def test_the_request_carries_what_was_asked_and_nothing_else(gateway: FakeGateway) -> None:
    gateway.scripts += [[started(), finished()]] * 2
    await run_in_pipe(["generate", "Why?", "--server", gateway.address])
    options = (
        "--system Short. --max-tokens 7 --max-draft-len 0 --temperature 0 --top-p 0.5 --top-k 3 "
        "--min-p 0.25 --repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--seed 18446744073709551615 --stop-token 5 --stop-token 6 --ignore-eos --show-rejected "
        "--verification coupled"
    )
    await run_in_pipe(["generate", "Why?", "--server", gateway.address, *options.split()])
    plain, full = gateway.requests
    assert [(m.role, m.content) for m in plain.messages] == [("user", "Why?")]
    assert {f.name for f, _ in plain.ListFields()} <= {"messages", "sampling"}
    assert not plain.sampling.ListFields()

    assert [(m.role, m.content) for m in full.messages] == [("system", "Short."), ("user", "Why?")]
    assert (full.max_tokens, full.max_draft_len) == (7, 0)
    assert full.HasField("max_draft_len")
    assert full.return_drafts
    assert full.return_token_text
    sampling = full.sampling
    assert sampling.HasField("temperature")
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 3)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.seed, list(sampling.stop_token_ids)) == (2**64 - 1, [5, 6])
    assert sampling.ignore_eos
    assert sampling.verification == VERIFICATION_COUPLED


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (["-"], "from a pipe\n", "from a pipe"),
        ([], "two\nlines\n\n", "two\nlines\n"),
    ],
)
async def test_the_prompt_can_come_from_standard_input(
    gateway: FakeGateway, arguments: list[str], stdin: str, prompt: str
) -> None:
    gateway.scripts.append([started(), finished()])
    done = await run_in_pipe(["generate", *arguments, "--server", gateway.address], stdin=stdin)
    assert done.code == 0
    assert gateway.requests[0].messages[0].content == prompt


async def test_a_raw_prompt_stays_as_it_stands(gateway: FakeGateway) -> None:
    gateway.scripts.append([started(), finished()])
    await run_in_pipe(["generate", "--raw", "--server", gateway.address], stdin="Once \n")
    assert gateway.requests[0].prompt == "Once \n"
    assert not gateway.requests[0].messages


async def test_a_terminal_shows_where_each_token_came_from(gateway: FakeGateway) -> None:
    gateway.scripts.append(SPECULATED)
    async with on_terminal(
        "generate", "Why?", "--server", gateway.address, "--show-rejected"
    ) as terminal:
        assert await terminal.ends() == 0
    assert (
        f"{AMBER}The{RESET}{GREEN} sky{RESET}{GREEN} is{RESET}"
        f"{STRUCK} green{RESET}{STRUCK}↵{RESET}{AMBER} blue{RESET}\n"
    ) in terminal.screen
    assert "acceptance 50% (2/4)" in terminal.screen


async def test_rejected_drafts_stay_hidden_unless_asked_for(gateway: FakeGateway) -> None:
    gateway.scripts.append(SPECULATED)
    async with on_terminal(
        "generate", "Why?", "--server", gateway.address, "--show-speculation"
    ) as terminal:
        assert await terminal.ends() == 0
    assert f"{GREEN} is{RESET}{AMBER} blue{RESET}\n" in terminal.screen
    assert "green" not in terminal.screen
    assert not gateway.requests[0].return_drafts


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
async def test_no_colour_where_it_is_not_wanted(gateway: FakeGateway, env: dict[str, str]) -> None:
    gateway.scripts.append(SPECULATED)
    async with on_terminal(
        "generate", "Why?", "--server", gateway.address, "--show-rejected", env=env
    ) as terminal:
        assert await terminal.ends() == 0
    assert "\x1b" not in terminal.screen
    assert "The sky is blue\n" in terminal.screen


async def test_text_cannot_command_the_terminal(gateway: FakeGateway) -> None:
    attack = "a\x1b]0;owned\x07b\x1b[2Jc\x9b31md\re\tf\x7f\x00"
    gateway.scripts += [[started(), target(attack), finished()]] * 2
    async with on_terminal("generate", "Why?", "--server", gateway.address) as terminal:
        assert await terminal.ends() == 0
    assert "a]0;ownedb[2Jc31mde\tf\n" in terminal.screen
    # A program that reads the answer gets every character of it.
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address])
    assert done.out == attack + "\n"


async def test_text_comes_before_the_end(gateway: FakeGateway) -> None:
    gateway.scripts.append([started(), target("early"), Hang()])
    async with on_terminal("generate", "Why?", "--server", gateway.address) as terminal:
        await terminal.sees("early")
        assert terminal.process.returncode is None
        terminal.type("\x03")
        assert await terminal.ends() == 130
    await asyncio.wait_for(gateway.cancelled.wait(), 30)
    assert "Traceback" not in terminal.screen


async def test_an_interrupt_before_the_first_token_cancels_too(gateway: FakeGateway) -> None:
    gateway.scripts.append([Hang()])
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "generate", "Why?", "--server", gateway.address,
        stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    await asyncio.wait_for(gateway.asked.wait(), 30)
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    await asyncio.wait_for(gateway.cancelled.wait(), 30)
    assert err == b""


async def test_a_reader_that_goes_away_cancels_quietly(gateway: FakeGateway) -> None:
    script: list[Step] = [started(), target("first\n")]
    gateway.scripts.append([*script, *[target("more\n")] * 20_000, Hang()])
    command = [*DRAFTGATE, "generate", "Why?", "--server", gateway.address]
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", '"$@" | head -1; echo "${PIPESTATUS[0]}"', "-", *command,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert out == b"first\n141\n"
    assert err == b""
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


async def test_an_error_after_some_text_keeps_the_text_and_the_counts(
    gateway: FakeGateway,
) -> None:
    gateway.scripts.append(
        [
            started(),
            target("so far"),
            finished(reason=FINISH_REASON_CANCELLED),
            Fail(grpc.StatusCode.UNAVAILABLE, "Triton is\nrestarting"),
        ]
    )
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address])
    assert (done.code, done.out) == (1, "so far\n")
    summary, error = done.err.splitlines()
    assert summary.startswith("1 token · ")
    assert summary.endswith("no verify steps · ended by cancelled")
    assert error == "error: Triton is restarting"


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: got 3.0, allowed: above 0 to 1"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "256 requests wait already"),
        (grpc.StatusCode.UNKNOWN, "something else"),
    ],
)
async def test_the_servers_own_words_are_the_error(
    gateway: FakeGateway, code: grpc.StatusCode, details: str
) -> None:
    gateway.scripts.append([Fail(code, details)])
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address])
    assert (done.code, done.out, done.err) == (1, "", f"error: {details}\n")


async def test_errors_are_red_on_a_terminal(gateway: FakeGateway) -> None:
    gateway.scripts.append([Fail(grpc.StatusCode.INTERNAL, "bro\x1b[2Jken")])
    async with on_terminal("generate", "Why?", "--server", gateway.address) as terminal:
        assert await terminal.ends() == 1
    assert terminal.screen == "\x1b[31merror: bro[2Jken\x1b[0m\n"


async def test_no_server_says_how_to_start_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nobody can answer here
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = await run_in_pipe(["generate", "Why?", "--server", address])
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: no server answers at {address}: start one with `draftgate serve`, "
        "or name another with --server HOST:PORT\n"
    )


async def test_a_server_that_dies_is_an_error(gateway: FakeGateway) -> None:
    gateway.scripts.append([started(), target("half"), Hang()])
    running = asyncio.create_task(run_in_pipe(["generate", "Why?", "--server", gateway.address]))
    await asyncio.wait_for(gateway.asked.wait(), 30)
    await gateway.stop()
    done = await running
    assert done.code == 1
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


async def test_a_deadline_that_passes_is_an_error(gateway: FakeGateway) -> None:
    gateway.scripts.append([started(), target("slow"), Hang()])
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address, "--timeout", "1.5"])
    assert (done.code, done.out) == (1, "slow\n")
    assert done.err == "error: not finished within 1.5 s\n"
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", ""], "PROMPT"),
        (["generate", "x", "--temperature", "hot"], "--temperature"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--max-tokens", "99999999999"], "--max-tokens"),
        (["generate", "x", "--stop-token", "3000000000"], "--stop-token"),
        (["generate", "x", "--timeout", "0"], "--timeout"),
        (["generate", "x", "--raw", "--system", "y"], "--system"),
        (["generate", "x", "--no-such-option"], "--no-such-option"),
        (["generate", "x", "--verification", "greedy"], "--verification"),
        (["chat", "--top-k", "1.5"], "--top-k"),
        (["chat", "--verification", "COUPLED!"], "--verification"),
        (["nonsense"], "nonsense"),
    ],
)
async def test_wrong_usage_names_the_option_and_exits_with_2(
    arguments: list[str], named: str
) -> None:
    done = await run_in_pipe(arguments)
    assert (done.code, done.out) == (2, "")
    assert named in done.err
    assert "Traceback" not in done.err


async def test_input_that_is_no_text_is_wrong_usage() -> None:
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "generate",
        stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    _, err = await process.communicate(b"\xff\xfe")
    assert process.returncode == 2
    assert b"not UTF-8" in err


async def test_an_argument_that_is_no_text_is_wrong_usage() -> None:
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "generate", b"\xff\xfe", stderr=asyncio.subprocess.PIPE, env=environment()
    )
    _, err = await process.communicate()
    assert process.returncode == 2
    assert b"not UTF-8" in err
    assert b"Traceback" not in err


async def test_output_that_cannot_be_written_is_one_line(gateway: FakeGateway) -> None:
    gateway.scripts.append([started(), *[target("more\n")] * 20_000, Hang()])
    with open("/dev/full", "wb") as full:
        process = await asyncio.create_subprocess_exec(
            *DRAFTGATE, "generate", "Why?", "--server", gateway.address,
            stdout=full, stderr=asyncio.subprocess.PIPE, env=environment(),
        )  # fmt: skip
        _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert err.decode().splitlines()[-1].startswith("error: the answer cannot be written: No space")
    assert b"Traceback" not in err
    await asyncio.wait_for(gateway.cancelled.wait(), 30)


async def test_version() -> None:
    done = await run_in_pipe(["--version"])
    assert re.fullmatch(r"draftgate \d+\.\d+\.\d+\n", done.out)
