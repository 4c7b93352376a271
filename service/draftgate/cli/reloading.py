"""SIGHUP: settings read again while the service serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

from draftgate.cli.logs import set_log_level
from draftgate.cli.render import say
from draftgate.config import Settings, changed
from draftgate.errors import DraftgateError
from draftgate.gateway.orders import Reload, SetLogLevel
from draftgate.gateway.server import Gateway
from draftgate.gateway.workers import Fleet

__all__ = ["Reloading"]


class Reloading:
    """Takes up what can be taken up while serving, and names the rest."""

    def __init__(self, settings: Settings, reread: Callable[[], Settings] | None) -> None:
        """reread: the settings as their sources are now. Without it SIGHUP ends the service, as it
        does when a terminal is closed."""
        self.gateway: Gateway | Fleet | None = None
        """What reloads; None while it does not serve yet."""
        self._settings = settings
        self._reread = reread
        self._running: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """SIGHUP reloads, inside, if there is something to read anew."""
        if self._reread is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._start, self._reread)
        yield  # Whoever looks after the other signals takes the handler away.

    def _start(self, reread: Callable[[], Settings]) -> None:
        task = asyncio.create_task(self._reload(reread))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reload(self, reread: Callable[[], Settings]) -> None:
        try:
            settings = await asyncio.to_thread(reread)
            level = logging.getLevelNamesMapping()[settings.log_level.upper()]
            if self.gateway is not None:
                await self.gateway.tell(Reload(settings.admission))
                await self.gateway.tell(SetLogLevel(level))
        except DraftgateError as error:
            say(f"not reloaded, all stays as it was: {error.message}")
            return
        set_log_level(settings.log_level)
        waiting = [key for key in changed(self._settings, settings) if not _reloads(key)]
        say(f"reloaded; only a restart changes {', '.join(waiting)}" if waiting else "reloaded")


def _reloads(key: str) -> bool:
    """Whether a setting is taken up."""
    return key == "log_level" or key.startswith("admission.")
