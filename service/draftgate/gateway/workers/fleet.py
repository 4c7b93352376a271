"""The parent of several workers: it starts them, keeps them and ends them, and gives the places."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admission import Admission, Capacity
from draftgate.gateway.config import GatewayConfig
from draftgate.gateway.listen import HeldPort
from draftgate.gateway.orders import DrainReplica, Nothing, Order, Reload
from draftgate.gateway.workers.member import Member
from draftgate.gateway.workers.messages import Begin

__all__ = ["Fleet", "FleetLimits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FleetLimits:
    """How patient the parent is."""

    min_backoff_s: float = 0.2
    """The pause before a worker that has ended is started again; it doubles with each time."""
    max_backoff_s: float = 10.0
    """The longest pause."""
    steady_s: float = 30.0
    """A worker that ran for so long is not failing again and again."""
    answer_timeout_s: float = 30.0
    """What a worker may take for an order; one that has just been started begins its gateway
    first."""
    look_interval_s: float = 5.0
    """The pause before it is looked whether a worker still answers; one that does not within the
    time for an order is killed."""
    exit_timeout_s: float = 15.0
    """What a worker may take beyond the grace to end, before it is killed."""


class Fleet:
    """Several gateways on one port, one in each worker process: `start` it, later `drain` it."""

    def __init__(
        self,
        config: GatewayConfig,
        workers: int,
        command: Sequence[str],
        *,
        log_settings: Mapping[str, str],
        limits: FleetLimits | None = None,
    ) -> None:
        """`command` starts a process that calls `run_worker` with the socket whose descriptor is
        its last argument, and hands what it gets to `set_up`; `log_settings` are among that."""
        self._config = config
        self._numbers = range(1, workers + 1)
        self._command = command
        self._log_settings = log_settings
        self._limits = limits or FleetLimits()
        self._admission = Admission(config.admission)
        self._members: dict[int, Member] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._standing: dict[str, Order] = {}
        """The last order of every kind that holds for who is started later too."""
        self._ports: list[HeldPort] = []
        """Of callers, then of operators, if those have one of their own."""

    @property
    def port(self) -> int:
        """The port that the workers listen on. Raises DraftgateError(FAILED_PRECONDITION) while it
        does not run."""
        if not self._ports:
            raise DraftgateError(ErrorCode.FAILED_PRECONDITION, "the gateway is not running")
        return self._ports[0].port

    @property
    def address(self) -> str:
        """Where the workers listen. Raises as `port` does."""
        _ = self.port
        return self._ports[0].listen

    @property
    def admin_address(self) -> str:
        """Where they listen for operators; empty if those have no listener of their own."""
        return self._ports[1].listen if len(self._ports) > 1 else ""

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of every worker that listens, by the worker's number."""
        found = ((number, member.pid) for number, member in self._members.items())
        return {number: pid for number, pid in found if pid is not None}

    async def start(self) -> None:
        """Start the workers and wait until all of them listen.

        Raises DraftgateError if the port is not to be had, or a worker cannot serve: none is left
        then, as after a cancellation.
        """
        security = self._config.security
        secured = bool(security.tls) or security.insecure
        try:
            for listen in filter(None, (self._config.listen, self._config.admin_listen)):
                self._ports.append(HeldPort(listen, secured=secured))
            async with asyncio.TaskGroup() as tasks:
                for number in self._numbers:
                    tasks.create_task(self._launch(number))
        except BaseException as error:
            await self._kill()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self._keepers = {asyncio.create_task(self._keep(each)) for each in self._numbers}

    async def tell(self, order: Order) -> int:
        """Have every worker carry out an order, also those that are started later.

        Returns how many generations run on all of them. Raises DraftgateError of the first worker
        that could not; a Reload has no effect on admission and on later workers then.
        """
        if not isinstance(order, Reload):
            self._stand(order)
        results = await asyncio.gather(
            *(member.carry_out(order) for member in self._members.values()),
            return_exceptions=True,
        )
        for each in results:
            if isinstance(each, BaseException):
                raise each
        if isinstance(order, Reload):
            self._stand(order)
            if order.admission is not None:
                self._admission.configure(order.admission)
            if order.rules is not None:
                # A worker that is started again serves before it is told of orders.
                self._config = self._config.ruled(order.rules)
        return self._admission.running

    async def drain(self, grace_s: float) -> None:
        """Stop: no worker takes new work, streams finish within `grace_s`, the rest is cut.

        Without effect if it has not started or has stopped. A cancellation ends all at once.
        """
        if not self._ports:
            return
        try:
            await self._end_keepers()
            for member in self._members.values():
                member.end(grace_s)
            async with asyncio.timeout(grace_s + self._limits.exit_timeout_s):
                await asyncio.gather(*(each.wait() for each in self._members.values()))
        except TimeoutError:
            _log.error("workers that did not end in time are killed")
        finally:
            await self._kill()

    async def _launch(self, number: int) -> None:
        """Start a worker; it has its place among the members while it runs."""
        member = Member(
            number,
            self._admission,
            tell=self.tell,
            on_capacity=self._capacity_changed,
            answer_timeout_s=self._limits.answer_timeout_s,
        )
        await member.open()
        # From here on it hears of every order, and of those before in the first message.
        self._members[number] = member
        admin_listen = self.admin_address or None
        config = replace(self._config, listen=self.address, admin_listen=admin_listen)
        begin = Begin(number, config, self._log_settings, tuple(self._standing.values()))
        try:
            await member.launch(self._command, begin)
        except BaseException:
            del self._members[number]
            raise

    async def _keep(self, number: int) -> None:
        """Start a worker again whenever it has ended, until cancelled."""
        limits = self._limits
        pause_s = limits.min_backoff_s
        while True:
            began_s = asyncio.get_running_loop().time()
            what = _how_it_ended(await self._watched(self._members[number]))
            del self._members[number]
            if asyncio.get_running_loop().time() - began_s >= limits.steady_s:
                pause_s = limits.min_backoff_s
            while number not in self._members:
                _log.error("worker %d %s: started again in %g s", number, what, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.max_backoff_s)
                try:
                    await self._launch(number)
                except DraftgateError as error:
                    what = f"could not start ({error.message})"
            _log.warning("worker %d serves again", number)

    async def _watched(self, member: Member) -> int:
        """Wait for a worker's end, and bring it about if the worker does not answer: its places,
        and the connections that came to it, are of no use to anybody."""
        ended = asyncio.create_task(member.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=self._limits.look_interval_s))[0]:
                try:
                    await member.carry_out(Nothing())
                except DraftgateError as error:
                    _log.error("%s, and is killed", error.message)
                    member.kill()
            return ended.result()
        finally:
            ended.cancel()

    def _stand(self, order: Order) -> None:
        if isinstance(order, DrainReplica):
            # Only what runs now moves.
            self._standing[f"{order.kind} {order.address}"] = replace(order, move=False)
        else:
            self._standing[order.kind] = order

    def _capacity_changed(self) -> None:
        """The engines are the same for all workers; who sees more of them is right about it."""
        said = [each.capacity for each in self._members.values() if each.capacity]
        if said:
            self._admission.set_capacity(max(said, key=_size))

    async def _end_keepers(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        self._keepers = set()

    async def _kill(self) -> None:
        """End what still runs, and let go of the ports."""
        await self._end_keepers()
        for member in self._members.values():
            member.kill()
        for member in self._members.values():
            await member.wait()
        self._members.clear()
        for port in self._ports:
            port.close()
        self._ports.clear()


def _size(capacity: Capacity) -> tuple[int, int]:
    return capacity.rows, capacity.kv_tokens


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by signal {-code}"
