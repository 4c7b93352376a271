"""Runs a program as a user does: in a pipe, or on a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

DRAFTGATE = (sys.executable, "-m", "draftgate.cli")

_PATIENCE_S = 60.0
"""When to call a test hung; says nothing about speed."""


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a person at a colour terminal."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    # Nobody answers the terminal's queries here.
    kept |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONUNBUFFERED": "0"}
    return kept | dict(extra or {})


async def run_in_pipe(
    arguments: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None
) -> Finished:
    """Run `draftgate ARGUMENTS` with pipes to its end."""
    process = await asyncio.create_subprocess_exec(
        *DRAFTGATE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(env),
    )
    async with asyncio.timeout(_PATIENCE_S):
        out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


class Terminal:
    """A program on a pseudo-terminal: what it wrote, and keys for it."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, slave: int) -> None:
        self.process = process
        self.screen = ""
        """Everything written so far, escape sequences included, \\r\\n as \\n."""
        self._master = master
        # Open for as long as the program runs: it opens its own, and a terminal nobody holds ends.
        self._slave: int | None = slave
        self._changed = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    def type(self, keys: str) -> None:
        """Press `keys`: \\x03 is Ctrl-C, \\x04 Ctrl-D."""
        os.write(self._master, keys.encode())

    async def sees(self, text: str, *, times: int = 1) -> None:
        """Wait until `text` has been written so many times."""
        try:
            async with asyncio.timeout(_PATIENCE_S), self._changed:
                await self._changed.wait_for(lambda: self.screen.count(text) >= times)
        except TimeoutError:
            raise AssertionError(f"never saw {text!r}, only {self.screen!r}") from None

    async def ends(self) -> int:
        """Wait for the program's end; returns its exit code."""
        async with asyncio.timeout(_PATIENCE_S):
            code = await self.process.wait()
            if self._slave is not None:
                os.close(self._slave)
                self._slave = None
            await self._reader
        return code

    async def close(self) -> None:
        """Kill the program if it still runs."""
        if self.process.returncode is None:
            self.process.kill()
        await self.ends()
        os.close(self._master)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._master, readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    data = os.read(self._master, 65536)
                except BlockingIOError:
                    continue
                except OSError:  # EIO: the program closed the terminal
                    return
                async with self._changed:
                    self.screen += data.decode(errors="replace").replace("\r\n", "\n")
                    self._changed.notify_all()
        finally:
            loop.remove_reader(self._master)


@contextlib.asynccontextmanager
async def on_terminal(
    *arguments: str, env: Mapping[str, str] | None = None, program: Sequence[str] = DRAFTGATE
) -> AsyncIterator[Terminal]:
    """Run `draftgate ARGUMENTS` with a terminal as its input, output and controlling terminal.

    `program` takes the place of `draftgate`.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    os.set_blocking(master, False)
    # The first terminal that a session's leader opens becomes its controlling terminal.
    take_terminal = 'exec 0<>"$0" 1>&0 2>&0; exec "$@"'
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", take_terminal, os.ttyname(slave), *program, *arguments,
        stdin=asyncio.subprocess.DEVNULL, env=environment(env), start_new_session=True,
    )  # fmt: skip
    terminal = Terminal(process, master, slave)
    try:
        yield terminal
    finally:
        await terminal.close()
