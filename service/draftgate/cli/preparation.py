"""Prepares the checkpoint in a process of its own.

Quantising is long CPU-bound work: in another process it can be interrupted at any moment, and its
memory is gone before Triton starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from draftgate.errors import DraftgateError, ErrorCode

__all__ = ["Preparation", "PreparationFailedError"]

_INTERRUPT_S = 10.0
"""How long an interrupted preparation may take to remove what it has written."""


class PreparationFailedError(Exception):
    """The preparation has ended and has told the user why."""


class Preparation:
    """One run of `draftgate model prepare`."""

    def __init__(self, source: Path, out: Path) -> None:
        self._command = (
            *(sys.executable, "-m", "draftgate.cli", "model", "prepare"),
            *("--from", str(source), "--out", str(out)),
        )

    async def run(self, forced: asyncio.Event) -> None:
        """Prepare the checkpoint, or see that it is there; its progress goes to stderr.

        Cancelling ends the process: gently, or at once when `forced` is set.
        Raises PreparationFailedError after its error line, DraftgateError if it died without one.
        """
        starting = asyncio.create_task(self._spawn())
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A process that is half started could not be ended.
            await _end(await starting, forced)
            raise
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            await _end(process, forced)
            raise
        if status < 0:
            raise DraftgateError(
                ErrorCode.UNAVAILABLE,
                f"preparing the checkpoint was ended by {signal.Signals(-status).name}"
                + (", most likely for lack of memory" if status == -signal.SIGKILL else ""),
            )
        if status > 0:
            raise PreparationFailedError

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            # What it says at its end is meant for who calls it by hand.
            stdout=asyncio.subprocess.DEVNULL,
            # Out of the terminal's reach: Ctrl-C is for the parent, which ends it.
            start_new_session=True,
        )


async def _end(process: asyncio.subprocess.Process, forced: asyncio.Event) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    ended = asyncio.create_task(process.wait())
    force = asyncio.create_task(forced.wait())
    await asyncio.wait({ended, force}, timeout=_INTERRUPT_S, return_when=asyncio.FIRST_COMPLETED)
    force.cancel()
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await ended
