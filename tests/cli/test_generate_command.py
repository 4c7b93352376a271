"""`draftgate generate` as a program, against a scripted gateway."""

from __future__ import annotations

import asyncio
import re
import signal
import socket

import grpc
import pytest

from draftgate._pb.draftgate.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_STOP_STRING,
    PRIORITY_BATCH,
    VERIFICATION_COUPLED,
    GenerateResponse,
)
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
        "--verification coupled --stop END --stop ## --n 1 --echo --priority batch"
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
    assert (list(full.stop), full.n, full.echo) == (["END", "##"], 1, True)
    assert full.priority == PRIORITY_BATCH


def of_choice(index: int, *events: GenerateResponse) -> list[Step]:
    for event in events:
        event.index = index
    return list(events)


async def test_several_answers_come_one_after_the_other(gateway: FakeGateway) -> None:
    first = of_choice(0, started(), target("a"), target("b"), finished())
    second = of_choice(1, started(), target("c"), target("d\n"), finished())
    third = of_choice(2, started(), target("e"), finished(reason=FINISH_REASON_STOP_STRING))
    # The last one is done before the others have begun.
    interleaved = [each for pair in zip(first, second, strict=True) for each in pair]
    gateway.scripts.append([*third, *interleaved])
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address, "--n", "3"])
    assert done.code == 0
    assert done.out == (
        "--- choice 1 of 3 ---\nab\n--- choice 2 of 3 ---\ncd\n--- choice 3 of 3 ---\ne\n"
    )
    ends = [re.sub("TTFT.*verify", "... verify", each) for each in done.err.splitlines()]
    assert ends == [
        "choice 1 of 3 · 2 tokens · ... verify steps · ended by eos",
        "choice 2 of 3 · 2 tokens · ... verify steps · ended by eos",
        "choice 3 of 3 · 1 token · ... verify steps · ended by stop string",
    ]
    assert gateway.requests[0].n == 3


async def test_the_first_answer_streams_and_what_came_of_all_is_kept(gateway: FakeGateway) -> None:
    gateway.scripts.append(
        [
            *of_choice(1, started(), target("other")),
            *of_choice(0, started(), target("early")),
            Hang(),
        ]
    )
    async with on_terminal(
        "generate", "Why?", "--server", gateway.address, "--n", "2", env={"NO_COLOR": "1"}
    ) as terminal:
        await terminal.sees("--- choice 1 of 2 ---\nearly")
        assert "other" not in terminal.screen
        terminal.type("\x03")
        assert await terminal.ends() == 130
    assert "early\n--- choice 2 of 2 ---\nother\n" in terminal.screen.replace("^C", "")


async def test_a_number_of_answers_that_the_server_refuses_is_its_error(
    gateway: FakeGateway,
) -> None:
    problem = "n: got 2000000000, allowed: an integer from 1 to 8"
    gateway.scripts.append([Fail(grpc.StatusCode.INVALID_ARGUMENT, problem)])
    done = await run_in_pipe(["generate", "Why?", "--server", gateway.address, "--n", "2000000000"])
    assert (done.code, done.out, done.err) == (1, "", f"error: {problem}\n")


async def test_the_prompt_comes_first_when_it_is_asked_for(gateway: FakeGateway) -> None:
    beginning = started()
    beginning.started.prompt_text = "Once upon"
    gateway.scripts += [[beginning, target(" a time"), finished()]] * 2
    command = ["generate", "--raw", "Once upon", "--echo", "--server", gateway.address]
    done = await run_in_pipe(command)
    assert (done.code, done.out) == (0, "Once upon a time\n")
    async with on_terminal(*command, "--show-speculation") as terminal:
        assert await terminal.ends() == 0
    assert f"\x1b[2mOnce upon{RESET}{AMBER} a time{RESET}\n" in terminal.screen


async def test_text_that_a_stop_string_held_back_is_coloured_too(gateway: FakeGateway) -> None:
    held = verified([" sky", " E"], [" green"], "N")
    held.tokens.text = " sky "
    released = verified(["X", "EN"], [], "D")
    released.tokens.text = "ENX"
    gateway.scripts.append([started(), held, released, finished(reason=FINISH_REASON_STOP_STRING)])
    async with on_terminal(
        *("generate", "Why?", "--server", gateway.address, "--stop", "END"), "--show-speculation"
    ) as terminal:
        assert await terminal.ends() == 0
    assert (
        f"{GREEN} sky{RESET}{GREEN} {RESET}{GREEN}E{RESET}{AMBER}N{RESET}{GREEN}X{RESET}\n"
    ) in terminal.screen
    assert "ended by stop string" in terminal.screen


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
        (["generate", "x", "--n", "3000000000"], "--n"),
        (["generate", "x", "--priority", "urgent"], "--priority"),
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


@pytest.mark.parametrize("arguments", [[b"\xff\xfe"], ["x", "--stop", b"\xff\xfe"]])
async def test_an_argument_that_is_no_text_is_wrong_usage(arguments: list[str | bytes]) -> None:
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "generate", *arguments, stderr=asyncio.subprocess.PIPE, env=environment()
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
