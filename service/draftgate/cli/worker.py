"""`python -m draftgate.cli.worker FD`: one of the processes of `draftgate gateway --workers`.

Its parent says everything else through the socket FD. Signals are the parent's too: it ends its
workers in order, whoever else is sent the same signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys

import uvloop

from draftgate.cli.heap import freeze_heap
from draftgate.cli.logs import log_to_stderr
from draftgate.gateway.workers import Begin, run_worker

__all__ = ["COMMAND", "main"]

COMMAND = (sys.executable, "-m", "draftgate.cli.worker")
"""What a `Fleet` starts."""


def main(descriptor: int) -> int:
    """Serve until the parent says otherwise; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = socket.socket(fileno=descriptor)
    parent.set_inheritable(False)
    freeze_heap()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_worker(parent, _set_up))


def _set_up(begin: Begin) -> None:
    def number(record: logging.LogRecord) -> bool:
        record.worker = begin.number
        return True

    log_to_stderr(begin.log_settings["level"], begin.log_settings["format"])
    for handler in logging.getLogger().handlers:
        handler.addFilter(number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
