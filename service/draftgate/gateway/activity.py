"""Whether anything still runs, for who waits until nothing does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Activity"]


class Activity:
    """Counts what runs."""

    def __init__(self) -> None:
        self.running = 0
        """How many run now."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """One more runs, inside."""
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs; False if something still does then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
