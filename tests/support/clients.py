"""The two clients behind one face, so that a test is written once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from draftgate.client import AsyncClient, Client

__all__ = ["KINDS", "Opened", "opened"]

KINDS = ("asyncio", "blocking")

Opened = Any
"""An AsyncClient, or a Client that looks like one."""

_END = object()


@asynccontextmanager
async def opened(kind: str, address: str, **options: Any) -> AsyncIterator[Opened]:
    """A client of this kind, closed at the end."""
    if kind == "asyncio":
        async with AsyncClient(address, **options) as client:
            yield client
        return
    with Client(address, **options) as blocking:
        yield _Threaded(blocking)


class _Threaded:
    """Something that blocks as if it did not: what it does, it does on a thread."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if name in ("gate", "admin"):
            return _Threaded(found)
        if name in ("generate", "watch", "watch_health", "watch_steps"):
            return lambda *args, **options: _ThreadedStream(found(*args, **options))
        return _on_thread(found) if callable(found) else found


class _ThreadedStream(_Threaded):
    def __getattr__(self, name: str) -> Any:
        if name in ("text", "completion"):
            return _on_thread(getattr(self._wrapped, name))
        return getattr(self._wrapped, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        found = await asyncio.to_thread(next, self._wrapped, _END)
        if found is _END:
            raise StopAsyncIteration
        return found

    async def __aenter__(self) -> Self:
        self._wrapped.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._wrapped.__exit__(kind, error, traceback)


def _on_thread(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: asyncio.to_thread(call, *args, **options)
