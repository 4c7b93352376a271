"""The wish to stop a service, as signals express it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine, Iterator

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

    async def run(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` to its end, or cut it short once that is forced. Raises what it raises."""
        task = asyncio.create_task(work)
        forced = asyncio.create_task(self.forced.wait())
        try:
            await asyncio.wait({task, forced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forced.cancel()
        if task.done():
            task.result()
        else:
            task.cancel()
            await asyncio.wait({task})

    def _ask(self) -> None:
        if self.requested.is_set():
            self.forced.set()
        self.requested.set()
