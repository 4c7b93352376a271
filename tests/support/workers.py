"""Workers: their side of the admission in this process, and real ones."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from draftgate.cli.worker import COMMAND
from draftgate.gateway import GatewayConfig
from draftgate.gateway.admission import Admission
from draftgate.gateway.workers import Fleet, FleetLimits
from draftgate.gateway.workers.counter import Counter
from draftgate.gateway.workers.link import Link
from draftgate.gateway.workers.messages import (
    FROM_WORKER,
    TO_WORKER,
    Admitted,
    Enter,
    FromWorker,
    Leave,
    Refused,
    ToWorker,
)
from draftgate.gateway.workers.remote import RemoteAdmission
from tests.support.gateway import MODEL, Client

__all__ = ["Branch", "branches", "clients", "running_fleet", "runs", "until"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


class Branch:
    """A worker's admission, at the end of a real link to the counter for it."""

    def __init__(self, admission: Admission) -> None:
        self._desk: Link[FromWorker] = Link(FROM_WORKER, TO_WORKER, self._asked, self._left)
        self._counter = Counter(admission, self._desk.send)
        self._link: Link[ToWorker] = Link(TO_WORKER, FROM_WORKER, self._answered, lambda: None)
        self.admission = RemoteAdmission(self._link.send)

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        await self._desk.open(ours)
        await self._link.open(theirs)

    async def close(self) -> None:
        """What the end of its process does."""
        await self._link.close()
        await self._desk.close()

    def _asked(self, message: FromWorker) -> None:
        if isinstance(message, Enter):
            self._counter.enter(message)
        else:
            assert isinstance(message, Leave)
            self._counter.leave(message)

    def _left(self) -> None:
        self._counter.close()

    def _answered(self, message: ToWorker) -> None:
        assert isinstance(message, Admitted | Refused)
        self.admission.received(message)


@asynccontextmanager
async def branches(admission: Admission, count: int = 2) -> AsyncIterator[list[Branch]]:
    found = [Branch(admission) for _ in range(count)]
    for each in found:
        await each.open()
    try:
        yield found
    finally:
        for each in found:
            await each.close()


@asynccontextmanager
async def running_fleet(
    triton_target: str, workers: int = 2, *, limits: FleetLimits | None = None, **config: Any
) -> AsyncIterator[Fleet]:
    """Real worker processes on a free port, drained at the end."""
    fields = {"listen": "127.0.0.1:0", "model_name": MODEL, "probe_interval_s": 0.05}
    fleet = Fleet(
        GatewayConfig(triton_target=triton_target, **(fields | config)),
        workers,
        COMMAND,
        log_settings={"level": "error", "format": "text"},
        limits=limits,
    )
    await fleet.start()
    try:
        yield fleet
    finally:
        pids = list(fleet.pids.values())
        await fleet.drain(0.0)
        assert not any(runs(pid) for pid in pids)


@asynccontextmanager
async def clients(
    address: str, count: int = 16, *, serving: bool = True
) -> AsyncIterator[Sequence[Client]]:
    """Clients on connections of their own, each of a worker that serves, or does not. So many of
    them come to both of two workers, but for one time in 32,768."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with AsyncExitStack() as stack:
        found = [
            Client(
                await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            )
            for _ in range(count)
        ]
        await asyncio.gather(*(each.wait_serving(serving) for each in found))
        yield found


def runs(pid: int) -> bool:
    """Whether there is such a process; one that has ended and waits to be collected is none."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
