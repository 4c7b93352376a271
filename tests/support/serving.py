"""`draftgate serve` on a terminal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence

from tests.support.footprint import Footprint
from tests.support.terminal import DRAFTGATE, Terminal, on_terminal

__all__ = ["address_of", "serving"]


@contextlib.asynccontextmanager
async def serving(
    footprint: Footprint,
    *options: str,
    program: Sequence[str] = DRAFTGATE,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Terminal]:
    """Run it on a free port; env: beside the footprint's."""
    arguments = ("serve", "--listen", "127.0.0.1:0", *options)
    variables = {**footprint.env, **(env or {})}
    async with on_terminal(*arguments, env=variables, program=program) as terminal:
        yield terminal


async def address_of(terminal: Terminal) -> str:
    """Wait until the service is ready; where its gateway listens."""
    await terminal.sees("Ctrl-C stops")
    [address] = re.findall(r"gateway on (\S+),", terminal.screen)
    return str(address)
