"""One worker: a gateway that shares its port, its places and its orders with others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable

from draftgate.errors import DraftgateError, shutting_down
from draftgate.gateway.orders import Order
from draftgate.gateway.server import Gateway
from draftgate.gateway.workers.link import Link
from draftgate.gateway.workers.messages import (
    FROM_WORKER,
    TO_WORKER,
    Admitted,
    Begin,
    CarriedOut,
    CarryOut,
    End,
    Failed,
    Failure,
    Listening,
    Refused,
    TellAll,
    ToldAll,
    ToWorker,
)
from draftgate.gateway.workers.remote import RemoteAdmission

__all__ = ["run_worker"]

_log = logging.getLogger(__name__)

_SERVED, _FAILED = 0, 1


async def run_worker(parent: socket.socket, set_up: Callable[[Begin], None]) -> int:
    """Serve as the process at the other end of `parent` says, until it says so or is gone; returns
    the exit code of this process.

    `set_up` is called once with the first that it says, before anything else happens.
    """
    worker = _Worker()
    await worker.link.open(parent)
    try:
        begin = await worker.begin
        if begin is None:
            return _FAILED
        set_up(begin)
        return await worker.serve(begin)
    finally:
        await worker.link.close()


class _Worker:
    """The `Team` of its gateway: what they have in common is in the parent process."""

    def __init__(self) -> None:
        self.link: Link[ToWorker] = Link(TO_WORKER, FROM_WORKER, self._received, self._left_alone)
        self.admission = RemoteAdmission(self.link.send)
        loop = asyncio.get_running_loop()
        self.begin: asyncio.Future[Begin | None] = loop.create_future()
        """None if the parent is gone before it said anything."""
        self._gateway: Gateway | None = None
        self._serving = asyncio.Event()
        self._end: asyncio.Future[float] = loop.create_future()
        """Done with the grace once the worker has to end."""
        self._orphaned = asyncio.Event()
        self._tickets = itertools.count(1)
        self._told: dict[int, asyncio.Future[int]] = {}
        self._orders: set[asyncio.Task[None]] = set()

    async def serve(self, begin: Begin) -> int:
        """From the start to the end; returns the exit code."""
        gateway = Gateway(begin.config, team=self)
        try:
            await gateway.start()
            for order in begin.orders:
                await gateway.carry_out(order)
        except DraftgateError as error:
            await gateway.drain(0.0)
            self.link.send(Failed(Failure.of(error)))
            return _FAILED
        self._gateway = gateway
        self._serving.set()
        self.link.send(Listening())
        grace_s = await self._end
        orphaned = asyncio.create_task(self._cut_if_orphaned(gateway))
        await gateway.drain(grace_s)
        orphaned.cancel()
        return _SERVED

    async def tell(self, order: Order) -> int:
        """Have every worker carry out an order; how many generations run on all of them.

        Raises DraftgateError of the first that could not.
        """
        if self._orphaned.is_set():
            raise shutting_down()
        ticket = next(self._tickets)
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._told[ticket] = told
        self.link.send(TellAll(ticket, order))
        try:
            return await told
        finally:
            del self._told[ticket]

    def _received(self, message: ToWorker) -> None:
        if isinstance(message, Admitted | Refused):
            self.admission.received(message)
        elif isinstance(message, ToldAll):
            told = self._told.get(message.ticket)
            if told is None or told.done():
                return  # Who gave the order does not wait any more.
            if message.failure:
                told.set_exception(message.failure.error())
            else:
                told.set_result(message.running)
        elif isinstance(message, CarryOut):
            task = asyncio.create_task(self._carry_out(message))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)
        elif isinstance(message, End):
            if not self._end.done():
                self._end.set_result(message.grace_s)
        elif not self.begin.done():
            self.begin.set_result(message)

    def _left_alone(self) -> None:
        """The parent is gone: nobody gives places any more, or looks after this process."""
        self._orphaned.set()
        for told in self._told.values():
            if not told.done():
                told.set_exception(shutting_down())
        if not self.begin.done():
            self.begin.set_result(None)
        if not self._end.done():
            if self._serving.is_set():
                _log.error("the parent process is gone: what runs is cut")
            self._end.set_result(0.0)

    async def _carry_out(self, message: CarryOut) -> None:
        await self._serving.wait()
        assert self._gateway is not None
        failure = None
        try:
            await self._gateway.carry_out(message.order)
        except DraftgateError as error:
            failure = Failure.of(error)
        self.link.send(CarriedOut(message.ticket, failure))

    async def _cut_if_orphaned(self, gateway: Gateway) -> None:
        await self._orphaned.wait()
        gateway.cut()
