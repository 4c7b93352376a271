"""SIGHUP: settings read again while the service serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator

from draftgate.cli.logs import set_log_level
from draftgate.cli.render import say
from draftgate.config import Settings, changed, gateway_config
from draftgate.errors import DraftgateError, joined
from draftgate.gateway.config import RequestRules
from draftgate.gateway.orders import Reload, SetLogLevel
from draftgate.gateway.problems import config_problems
from draftgate.gateway.server import Gateway
from draftgate.gateway.workers import Fleet

__all__ = ["Reloading"]

_log = logging.getLogger(__name__)

_SECTIONS = {"log_level", "admission", *RequestRules.names()}
"""What is taken up."""


class Reloading:
    """Takes up what can be taken up while serving, and names the rest. Settings with which a
    service could not start change nothing."""

    def __init__(self, settings: Settings, reread: Callable[[], Settings] | None) -> None:
        """reread: the settings as their sources are now. Without it SIGHUP ends the service, as it
        does when a terminal is closed."""
        self.gateway: Gateway | Fleet | None = None
        """What reloads; None while it does not serve yet."""
        self._settings = settings
        self._reread = reread
        self._running: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

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
        async with self._turn:  # Else what was read first might be taken up last.
            try:
                settings = await asyncio.to_thread(_read, reread)
                level = logging.getLevelNamesMapping()[settings.log_level.upper()]
                if self.gateway is not None:
                    rules = RequestRules.of(settings)
                    await self.gateway.tell(Reload(settings.admission, rules))
                    await self.gateway.tell(SetLogLevel(level))
            except DraftgateError as error:
                _log.error("not reloaded, all stays as it was: %s", error.message)
                return
            set_log_level(settings.log_level)
            waiting = [
                key
                for key in changed(self._settings, settings)
                if key.partition(".")[0] not in _SECTIONS
            ]
        say(f"reloaded; only a restart changes {', '.join(waiting)}" if waiting else "reloaded")


def _read(reread: Callable[[], Settings]) -> Settings:
    """The settings as they are now. Raises DraftgateError for all that is wrong with them, also
    with files that only a restart would look at."""
    settings = reread()
    config = gateway_config(
        settings,
        triton_target=settings.triton or "",
        model_name=settings.model_name or "",
        # The model is not loaded again; what its own file says is for the gateway to look at.
        tokenizer_dir=None,
    )
    problems = list(config_problems(config))
    if problems:
        raise joined(problems)
    return settings
