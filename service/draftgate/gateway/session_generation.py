"""One generation of a session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from draftgate.errors import DraftgateError, ErrorCode, deadline_passed
from draftgate.gateway.choices import run_choices
from draftgate.gateway.core import GenerationCore, Running
from draftgate.gateway.events import Event, Tokens
from draftgate.gateway.validate import GenerationCall

__all__ = ["Answer", "Ended", "Happened", "SessionGeneration"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Happened:
    """An event of a generation."""

    id: str
    event: Event


@dataclass(frozen=True)
class Ended:
    """A generation is over."""

    id: str
    error: DraftgateError | None
    """What ended it early."""


Answer = Happened | Ended


class SessionGeneration:
    """Runs once. Ends by itself, by `end`, or by being cancelled with the whole session."""

    def __init__(
        self, session_id: str, call: GenerationCall, *, timeout_ms: int | None, credit: int | None
    ) -> None:
        """`credit`: how many chunks of tokens may be told before `grant`; None has no limit."""
        self.id = session_id
        self._call = call
        self._timeout_ms = timeout_ms
        self._credit = credit
        self._granted = asyncio.Event()
        self._leave: asyncio.Timeout | None = None
        self._running: Running | None = None
        self._ended_by: DraftgateError | None = None

    async def run(
        self,
        core: GenerationCore,
        tell: Callable[[Answer], Awaitable[None]],
        *,
        credit_timeout_s: float,
    ) -> Ended:
        """Run it to its end, and how it ended. `tell` hears of every event."""
        timer = self._timer()
        error: DraftgateError | None = None
        try:
            async with asyncio.timeout(None) as self._leave:
                if self._ended_by is not None:
                    raise self._ended_by
                async with run_choices(core, self._call) as self._running:
                    async for event in self._running:
                        if isinstance(event, Tokens):
                            await self._spend(credit_timeout_s)
                        await tell(Happened(self.id, event))
        except TimeoutError:
            error = self._ended_by or _broken()
        except DraftgateError as failure:
            error = failure
        except Exception:  # noqa: BLE001 - a bug: logged here, and hidden from the caller
            _log.exception("a generation of a session failed")
            error = _broken()
        finally:
            if timer is not None:
                timer.cancel()
        return Ended(self.id, error)

    def end(self, error: DraftgateError) -> None:
        """End it with `error`; if it runs already, it still tells what was done. Not to be called
        after `run`."""
        if self._ended_by is not None:
            return
        self._ended_by = error
        # What it has left to tell is little, and must not wait.
        self._credit = None
        self._granted.set()
        if self._running is not None and self._running.end(error):
            return
        if self._leave is not None:
            self._leave.reschedule(asyncio.get_running_loop().time())

    def grant(self, credit: int) -> None:
        """Allow so many more chunks of tokens."""
        if self._credit is not None:
            self._credit += credit
            self._granted.set()

    def _timer(self) -> asyncio.TimerHandle | None:
        if self._timeout_ms is None:
            return None
        loop = asyncio.get_running_loop()
        return loop.call_later(self._timeout_ms / 1000, self.end, deadline_passed())

    async def _spend(self, timeout_s: float) -> None:
        """Wait for a credit. Raises DraftgateError(RESOURCE_EXHAUSTED) if none comes."""
        if self._credit == 0:
            self._granted.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._granted.wait()
            except TimeoutError as error:
                raise DraftgateError(
                    ErrorCode.RESOURCE_EXHAUSTED, f"no credits came for {timeout_s:g} s"
                ) from error
        if self._credit is not None:
            self._credit -= 1


def _broken() -> DraftgateError:
    return DraftgateError(ErrorCode.INTERNAL, "internal error")
