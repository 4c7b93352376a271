"""Runs one program and leaves nothing of it behind, whoever dies first.

    python -I -S guardian.py GRACE_S SHM_PREFIX STATE_DIR COMMAND...

It is a process of its own because it has to outlive the one that asked for it: tritonserver starts
a process for every Python model, and those, like its shared memory, can outlive tritonserver. The
guardian ends the program when its own standard input closes (the parent stopped it, or was killed)
or on SIGTERM: SIGTERM first, and after GRACE_S seconds SIGKILL for everything that is left. It does
the same at once when one of the program's processes dies, which tritonserver does not notice. At
the end it removes the shared memory of that prefix and the state directory.

It exits with the program's status, 128 + the signal if one ended it, and imports nothing but the
standard library, so that it starts fast and cannot fail with the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_CHECK_INTERVAL_S = 1.0
"""How often it looks for dead processes. One counts when it is seen dead twice in a row, because
tritonserver takes a moment to collect a process that it ended itself."""

_KILL_TIMEOUT_S = 10.0
"""How long killed processes may take to disappear before it gives up on them."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    grace_s, shm_prefix, state_dir, *command = arguments
    # Orphans of the program become children of this process, which then can collect them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake = _wake_on_signals()
    try:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guardian(os.getpid())
        )
        if _watch(program, wake):
            program.terminate()
            _wait(program, wake, float(grace_s))
        died_on_its_own = program.poll()
        _kill_family(program)
        if died_on_its_own is not None and died_on_its_own < 0:
            _say(f"tritonserver was ended by signal {-died_on_its_own}")
        status = program.returncode
        if status is None:
            return 1
        return status if status >= 0 else 128 - status
    finally:
        remove_files(shm_prefix, state_dir)


def remove_files(shm_prefix: str, state_dir: str) -> None:
    """Remove the shared memory of that prefix and the state directory."""
    for region in Path("/dev/shm").glob(shm_prefix + "*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(state_dir, ignore_errors=True)


def _watch(program: subprocess.Popen[bytes], wake: int) -> bool:
    """Block until the program has to end; False if it, or a process of it, already died."""
    dead_before: set[int] = set()
    next_check = time.monotonic() + _CHECK_INTERVAL_S
    while program.poll() is None:
        wait_s = max(0.0, next_check - time.monotonic())
        ready, _, _ = select.select([0, wake], [], [], wait_s)
        if 0 in ready and not os.read(0, 4096):
            return True
        if wake in ready and set(os.read(wake, 64)) - {signal.SIGCHLD}:
            return True
        if time.monotonic() < next_check:
            continue
        next_check = time.monotonic() + _CHECK_INTERVAL_S
        dead = {member.pid for member in _family() if member.dead and member.pid != program.pid}
        if dead & dead_before:
            _say("a model's process died")
            return False
        dead_before = dead
    return False


def _wait(program: subprocess.Popen[bytes], wake: int, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while program.poll() is None and (left_s := deadline - time.monotonic()) > 0:
        if select.select([wake], [], [], left_s)[0]:
            os.read(wake, 64)


def _kill_family(program: subprocess.Popen[bytes]) -> None:
    """End and collect every process of the program."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while family := list(_family()):
        if time.monotonic() > deadline:
            _say(f"processes {[member.pid for member in family]} cannot be killed")
            return
        for member in family:
            if not member.dead:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        # Through `poll` first, so that its exit status is not lost to the loop over the others.
        if program.poll() is not None:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.02)


class _Member(NamedTuple):
    pid: int
    dead: bool
    """Ended, but not collected by its parent."""


def _family() -> Iterator[_Member]:
    """Everything in this process's group, and orphans that left the group."""
    me, group = os.getpid(), os.getpgrp()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # it ended in this moment
        # The name in parentheses may itself hold spaces and parentheses.
        state, parent, its_group = stat.rpartition(")")[2].split()[:3]
        if int(its_group) == group or int(parent) == me:
            yield _Member(int(entry), state == "Z")


def _wake_on_signals() -> int:
    """A descriptor that yields the number of each signal caught."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)

    def caught(number: int, frame: FrameType | None) -> None:
        """The wake-up descriptor says it all."""

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, caught)
    return read


def _die_with_guardian(guardian: int) -> Callable[[], None]:
    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)

    return prepare


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _say(message: str) -> None:
    # The parent that reads this may be gone.
    with contextlib.suppress(OSError):
        os.write(1, f"guardian: {message}\n".encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
