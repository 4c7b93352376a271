"""`draftgate chat` as a program, in a pipe and on a terminal, against a scripted gateway."""

from __future__ import annotations

import asyncio
import signal

import grpc

from draftgate._pb.draftgate.v1.generation_pb2 import VERIFICATION_REJECTION
from draftgate._pb.draftgate.v1.model_pb2 import Model
from tests.fakes.gateway import MODEL, Fail, FakeGateway, Hang, emitted, finished, started, target
from tests.support.terminal import DRAFTGATE, environment, on_terminal, run_in_pipe

PROMPT = "\x1b[?2004h"
"""prompt_toolkit turns bracketed paste on when it is ready for a line."""


def said(gateway: FakeGateway, call: int) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in gateway.requests[call].messages]


async def test_a_pipe_holds_a_conversation_line_by_line(gateway: FakeGateway) -> None:
    gateway.scripts += [
        [started(), target("Hello!"), finished()],
        [started(), target("You said hi."), finished()],
    ]
    done = await run_in_pipe(
        [
            *("chat", "--server", gateway.address, "--system", "Be brief."),
            *("--temperature", "0", "--verification", "rejection"),
        ],
        stdin="hi\n\nwhat did I say?",
    )
    assert (done.code, done.out) == (0, "Hello!\nYou said hi.\n")
    assert done.err.count("ended by eos") == 2
    assert said(gateway, 0) == [("system", "Be brief."), ("user", "hi")]
    assert said(gateway, 1) == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "Hello!"),
        ("user", "what did I say?"),
    ]
    assert gateway.requests[1].sampling.HasField("temperature")
    assert gateway.requests[1].sampling.verification == VERIFICATION_REJECTION


async def test_commands(gateway: FakeGateway) -> None:
    gateway.scripts += [[started(), target("a"), finished()]] * 3
    done = await run_in_pipe(
        ["chat", "--server", gateway.address],
        stdin="/help\none\n/system Be rude.\ntwo\n/clear\n/system\n/nonsense\nthree\n/quit\nfour\n",
    )
    assert done.code == 0
    assert "/system TEXT" in done.err
    assert "/nonsense is no command" in done.err
    assert said(gateway, 0) == [("user", "one")]
    assert said(gateway, 1)[0] == ("system", "Be rude.")
    assert said(gateway, 1)[-1] == ("user", "two")
    assert said(gateway, 2) == [("user", "three")]


async def test_the_oldest_turns_make_room(gateway: FakeGateway) -> None:
    # The model has 512 tokens, of which 128 are kept for the answer.
    gateway.scripts += [
        [started(prompt=150), emitted("1", 50), finished()],
        [started(prompt=250), emitted("2", 100), finished()],
        [started(prompt=160), emitted("3", 10), finished()],
    ]
    done = await run_in_pipe(
        ["chat", "--server", gateway.address, "--max-tokens", "128"],
        stdin=f"one\ntwo\n{'x' * 100}\n",
    )
    assert done.code == 0
    assert said(gateway, 1)[0] == ("user", "one")
    assert said(gateway, 2) == [("user", "two"), ("assistant", "2"), ("user", "x" * 100)]
    assert "oldest turn is dropped" in done.err


async def test_a_pipe_stops_at_the_first_error(gateway: FakeGateway) -> None:
    gateway.scripts.append([Fail(grpc.StatusCode.UNAVAILABLE, "Triton is restarting")])
    done = await run_in_pipe(["chat", "--server", gateway.address], stdin="one\ntwo\n")
    assert (done.code, done.out, done.err) == (1, "", "error: Triton is restarting\n")


async def test_a_model_without_chat_template_is_refused(gateway: FakeGateway) -> None:
    gateway.model = Model()
    gateway.model.CopyFrom(MODEL)
    gateway.model.has_chat_template = False
    done = await run_in_pipe(["chat", "--server", gateway.address], stdin="one\n")
    assert done.code == 1
    assert done.err == ("error: fake has no chat template: use `draftgate generate --raw`\n")


async def test_a_terminal_holds_a_conversation(gateway: FakeGateway) -> None:
    gateway.scripts += [
        [started(), target("Hello"), target(" there!"), finished()],
        [started(), target("Again!"), finished()],
    ]
    async with on_terminal("chat", "--server", gateway.address) as terminal:
        await terminal.sees(PROMPT)
        terminal.type("hi\r")
        await terminal.sees("Hello there!")
        await terminal.sees(PROMPT, times=2)
        terminal.type("and?\r")
        await terminal.sees("Again!")
        await terminal.sees(PROMPT, times=3)
        terminal.type("\x04")
        assert await terminal.ends() == 0
    assert said(gateway, 1) == [("user", "hi"), ("assistant", "Hello there!"), ("user", "and?")]


async def test_ctrl_c_stops_the_answer_and_only_the_answer(gateway: FakeGateway) -> None:
    gateway.scripts += [
        [started(), target("Once upon"), Hang()],
        [started(), target("Fine."), finished()],
    ]
    async with on_terminal("chat", "--server", gateway.address) as terminal:
        await terminal.sees(PROMPT)
        terminal.type("a story\r")
        await terminal.sees("Once upon")
        terminal.type("\x03")
        await terminal.sees("Stopped.")
        await asyncio.wait_for(gateway.cancelled.wait(), 30)
        # At the prompt it takes back the line.
        await terminal.sees(PROMPT, times=2)
        terminal.type("forget this\x03")
        await terminal.sees(PROMPT, times=3)
        terminal.type("shorter\r")
        await terminal.sees("Fine.")
        terminal.type("/quit\r")
        assert await terminal.ends() == 0
    assert said(gateway, 1) == [
        ("user", "a story"),
        ("assistant", "Once upon"),
        ("user", "shorter"),
    ]
    assert "Traceback" not in terminal.screen


async def test_an_error_at_a_terminal_leaves_the_chat_going(gateway: FakeGateway) -> None:
    gateway.scripts += [
        [Fail(grpc.StatusCode.UNAVAILABLE, "Triton is restarting")],
        [started(), target("Back."), finished()],
    ]
    async with on_terminal("chat", "--server", gateway.address) as terminal:
        await terminal.sees(PROMPT)
        terminal.type("one\r")
        await terminal.sees("error: Triton is restarting")
        terminal.type("two\r")
        await terminal.sees("Back.")
        await terminal.sees(PROMPT, times=3)
        terminal.type("\x04")
        assert await terminal.ends() == 0
    assert said(gateway, 1) == [("user", "two")]


async def test_an_interrupt_while_waiting_for_a_line_ends_a_piped_chat(
    gateway: FakeGateway,
) -> None:
    gateway.scripts.append([started(), target("Hello!"), finished()])
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE, "chat", "--server", gateway.address,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"hi\n")
    assert await process.stdout.readline() == b"Hello!\n"
    assert b"ended by eos" in await process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, out, err) == (130, b"", b"")
