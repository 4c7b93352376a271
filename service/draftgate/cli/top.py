"""`draftgate top`: a live view of a server's gate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from draftgate._pb.draftgate.v1.gate_pb2 import GateState, WatchStateResponse
from draftgate._pb.draftgate.v1.model_pb2 import Model
from draftgate.cli import options
from draftgate.cli.client import GatewayClient
from draftgate.cli.render import writing
from draftgate.cli.top_view import frame

__all__ = ["top"]

_CONNECT_TIMEOUT_S = 10.0


def top(
    server: options.Server = options.DEFAULT_SERVER,
    interval_ms: Annotated[int, typer.Option(help="Between two looks at the server.")] = 1000,
    once: Annotated[
        bool,
        typer.Option("--once", help="Show one interval and end, as where no terminal watches."),
    ] = False,
) -> None:
    """Watch the gate live: rows, draft length and why, acceptance, speed, predicted against
    measured step time. Ctrl-C ends it."""
    console = Console()
    live = not once and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    shown = _Shown(console, live=live)
    try:
        asyncio.run(_watch(server, interval_ms, shown))
    except KeyboardInterrupt:
        if not live:
            raise
    finally:
        shown.leave()


class _Shown:
    """What the terminal shows."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self.live = live
        self._console = console
        self._latest: RenderableType | None = None
        self._left = False

    @contextlib.contextmanager
    def screen(self) -> Iterator[Live | None]:
        """The terminal's other screen, for as long as it is watched live."""
        if not self.live:
            yield None
            return
        with Live(console=self._console, screen=True, auto_refresh=False) as screen:
            yield screen

    def show(self, view: RenderableType, screen: Live | None) -> None:
        self._latest = view
        if screen is not None:
            with writing(sys.stdout, "the output"):
                screen.update(view, refresh=True)

    def leave(self) -> None:
        """Leave the latest view behind, where the next prompt of the shell follows it."""
        if self._latest is not None:
            view, self._latest = self._latest, None
            with writing(sys.stdout, "the output"):
                self._console.print(view)
                self._console.file.flush()


async def _watch(server: str, interval_ms: int, shown: _Shown) -> None:
    async with GatewayClient(server) as client:
        model = await client.model(timeout_s=_CONNECT_TIMEOUT_S)
        async with aclosing(client.watch_gate(interval_ms=interval_ms)) as responses:
            await _follow(model, responses, shown)


async def _follow(
    model: Model, responses: AsyncIterator[WatchStateResponse], shown: _Shown
) -> None:
    before: GateState | None = None
    with shown.screen() as screen:
        async for response in responses:
            now = response.state
            if shown.live or before is not None:
                shown.show(frame(model, before, now), screen)
                if not shown.live:
                    return
            before = now
