"""The wish to stop a service, as signals express it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

__all__ = ["Stop"]


class Stop:
    """The first SIGINT, SIGTERM or SIGHUP asks for an end, the second for one at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._ask)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _ask(self) -> None:
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()
