"""One run of a worker process, as its parent sees it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Awaitable, Callable, Sequence

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admission import Admission, Capacity
from draftgate.gateway.orders import Order
from draftgate.gateway.workers.counter import Counter
from draftgate.gateway.workers.link import Link
from draftgate.gateway.workers.messages import (
    FROM_WORKER,
    TO_WORKER,
    Begin,
    CarriedOut,
    CarryOut,
    End,
    Enter,
    Failed,
    Failure,
    FromWorker,
    Holds,
    Leave,
    TellAll,
    ToldAll,
)

__all__ = ["Member"]


class Member:
    """Whoever `launch`es one has to wait for its end."""

    def __init__(
        self,
        number: int,
        admission: Admission,
        *,
        tell: Callable[[Order], Awaitable[int]],
        on_capacity: Callable[[], None],
        answer_timeout_s: float,
    ) -> None:
        """`tell` has every worker carry out an order; `on_capacity` hears that `capacity` has
        changed; an order may take `answer_timeout_s`."""
        self.number = number
        self.capacity: Capacity | None = None
        """What the engines that it sees can hold; None while it has not said."""
        self._tell = tell
        self._on_capacity = on_capacity
        self._answer_timeout_s = answer_timeout_s
        self._link: Link[FromWorker] = Link(FROM_WORKER, TO_WORKER, self._received, self._gone)
        self._counter = Counter(admission, self._link.send)
        self._process: asyncio.subprocess.Process | None = None
        self._listening = asyncio.get_running_loop().create_future()
        self._tickets = itertools.count(1)
        self._ordered: dict[int, asyncio.Future[None]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The process, once it listens."""
        return self._process.pid if self._process and _succeeded(self._listening) else None

    async def open(self) -> None:
        """Have a link, on which a process can be told things before it runs."""
        ours, self._theirs = socket.socketpair()
        try:
            await self._link.open(ours)
        except BaseException:
            ours.close()
            self._theirs.close()
            raise

    async def launch(self, command: Sequence[str], begin: Begin) -> None:
        """Start the process and wait until it listens. To be called once it is open.

        `command` gets the number of a file descriptor as its last argument: its end of the link.
        Raises DraftgateError if it cannot be started, or says why it cannot serve, or just ends; it
        is gone then, as it is after a cancellation.
        """
        self._link.send(begin)
        launched = False
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                str(self._theirs.fileno()),
                pass_fds=(self._theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                # Out of the terminal's reach: Ctrl-C is for the parent, which ends its workers.
                start_new_session=True,
            )
            # Else the link would not end with the process.
            self._theirs.close()
            await self._listening
            launched = True
        except OSError as error:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"cannot start a worker: {error.strerror}: {error.filename}",
            ) from error
        finally:
            self._theirs.close()
            # A cancellation may come in the moment in which it begins to listen.
            if not launched:
                await self._give_up()

    async def wait(self) -> int:
        """Wait for the end of the process; its exit code, or minus the signal that ended it."""
        assert self._process is not None
        code = await self._process.wait()
        await self._link.close()
        return code

    def end(self, grace_s: float) -> None:
        """Have it drain and exit."""
        self._link.send(End(grace_s))

    def kill(self) -> None:
        """End it at once."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def carry_out(self, order: Order) -> None:
        """Have it carry out an order. One that ends meanwhile needs no orders.

        Raises DraftgateError if it could not, or takes too long.
        """
        ticket = next(self._tickets)
        ordered = self._ordered[ticket] = asyncio.get_running_loop().create_future()
        self._link.send(CarryOut(ticket, order))
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await ordered
        except TimeoutError as error:
            raise DraftgateError(
                ErrorCode.UNAVAILABLE,
                f"worker {self.number} did not answer within {self._answer_timeout_s:g} s",
            ) from error
        finally:
            del self._ordered[ticket]

    async def _give_up(self) -> None:
        if self._process is None:
            await self._link.close()
            return
        self.kill()
        await self.wait()

    def _received(self, message: FromWorker) -> None:
        if isinstance(message, Enter):
            self._counter.enter(message)
        elif isinstance(message, Leave):
            self._counter.leave(message)
        elif isinstance(message, Holds):
            self.capacity = Capacity(message.rows, message.kv_tokens)
            self._on_capacity()
        elif isinstance(message, TellAll):
            task = asyncio.create_task(self._tell_all(message))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        elif isinstance(message, CarriedOut):
            self._carried_out(message)
        elif not self._listening.done():
            if isinstance(message, Failed):
                self._listening.set_exception(message.failure.error())
            else:
                self._listening.set_result(None)

    def _carried_out(self, message: CarriedOut) -> None:
        ordered = self._ordered.get(message.ticket)
        if ordered is None or ordered.done():
            return
        if message.failure:
            ordered.set_exception(message.failure.error())
        else:
            ordered.set_result(None)

    def _gone(self) -> None:
        """The process has ended, or is about to."""
        self._counter.close()
        self.capacity = None
        self._on_capacity()
        for ordered in self._ordered.values():
            if not ordered.done():
                ordered.set_result(None)
        if not self._listening.done():
            self._listening.set_exception(
                DraftgateError(
                    ErrorCode.UNAVAILABLE, f"worker {self.number} ended before it listened"
                )
            )

    async def _tell_all(self, message: TellAll) -> None:
        running, failure = 0, None
        try:
            running = await self._tell(message.order)
        except DraftgateError as error:
            failure = Failure.of(error)
        self._link.send(ToldAll(message.ticket, running, failure))


def _succeeded(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
