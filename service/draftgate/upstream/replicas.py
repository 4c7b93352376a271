"""All replicas of one gateway: which there are, which of them may be used, and the next one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from draftgate.errors import DraftgateError, ErrorCode, invalid_argument
from draftgate.upstream.addresses import Addresses, DnsName, resolve
from draftgate.upstream.balance import choose
from draftgate.upstream.client import TritonClient
from draftgate.upstream.complaint import Complaint
from draftgate.upstream.replica import Probe, Replica, ReplicaLimits
from draftgate.upstream.types import EngineDescription

__all__ = ["ReplicaSet", "ReplicaSetConfig"]

_log = logging.getLogger(__name__)

_STALL_LOOKS = 10
"""How often in `stall_s` it is looked whether generations move."""

Resolve = Callable[[DnsName, float], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True)
class ReplicaSetConfig:
    """How replicas are found and chosen from."""

    affinity_tokens: int = 1024
    """How much more than the least loaded a replica may have to do, in tokens, and still get the
    prompts whose beginning it had before; 0 looks at the load alone."""
    resolve_interval_s: float = 5.0
    """Time between two look-ups of a DNS name."""
    resolve_timeout_s: float = 5.0
    """How long a look-up may take; if it fails, the addresses known before stay."""
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    """When a replica counts as lost."""


class ReplicaSet:
    """Needs a running event loop: `start` it, later `close` it, from the same one."""

    def __init__(
        self,
        addresses: Addresses,
        config: ReplicaSetConfig,
        connect: Callable[[str], TritonClient],
        *,
        probe: Probe,
        resolve: Resolve = resolve,
    ) -> None:
        """`connect` makes the client of an address, host:port."""
        self._config = config
        self._addresses = addresses
        self._connect = connect
        self._probe = probe
        self._resolve = resolve
        self._replicas: dict[str, Replica] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._jobs: list[asyncio.Task[None]] = []
        self._found: dict[DnsName, tuple[str, ...]] = {}
        self._complaints = {
            name: Complaint(
                _log,
                what="addresses stay as they were",
                over=f"{name.host} has been looked up again",
                fields={"host": name.host},
            )
            for name in addresses.names
        }
        self._drained: set[str] = set()
        self.changed = asyncio.Event()
        """Set, and replaced by a new one, when a replica may have changed."""

    def start(self) -> None:
        """Look for replicas and watch them."""
        self._update()
        self._jobs = [asyncio.create_task(self._watch_progress())]
        if self._addresses.names:
            self._jobs.append(asyncio.create_task(self._watch_names()))

    async def close(self) -> None:
        """Leave all replicas; what still runs on them is told to stop."""
        tasks = [*self._jobs, *self._watches.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(replica.client.close() for replica in self._replicas.values()))

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Every one that is known, in the order in which they came."""
        return tuple(self._replicas.values())

    @property
    def serving(self) -> bool:
        """Whether any replica can generate."""
        return any(replica.serving for replica in self._replicas.values())

    @property
    def engine(self) -> EngineDescription:
        """What is served. Raises DraftgateError(UNAVAILABLE) while no replica can generate."""
        engine = self.named("").engine
        assert engine is not None
        return engine

    def named(self, target: str) -> Replica:
        """The replica at this address; the first that can generate if it is empty.

        Raises DraftgateError: INVALID_ARGUMENT naming the field `replica` for an address that is
        not here, UNAVAILABLE if none can generate.
        """
        if target:
            return self.known(target)
        ready = [replica for replica in self._replicas.values() if replica.serving]
        if not ready:
            raise DraftgateError(ErrorCode.UNAVAILABLE, self.reason)
        return min(ready, key=lambda replica: replica.ejected)

    def known(self, target: str) -> Replica:
        """The replica at this address. Raises DraftgateError(INVALID_ARGUMENT) if there is none."""
        if target not in self._replicas:
            raise invalid_argument("replica", target, f"one of {', '.join(self._replicas)}")
        return self._replicas[target]

    def set_draining(self, target: str, draining: bool, *, move: bool = False) -> None:
        """Whether an operator wants no new generations on the replica at this address, be it here
        already or not. move: what runs on it goes on elsewhere now."""
        if draining:
            self._drained.add(target)
        else:
            self._drained.discard(target)
        replica = self._replicas.get(target)
        if replica is None:
            return
        replica.draining = draining
        _log.info("replica %s %s", target, "drains" if draining else "does not drain any more")
        if move:
            replica.move("the replica was drained")
        self.notify()

    def others(self, avoid: Collection[str], like: EngineDescription | None) -> list[Replica]:
        """The replicas that may get a generation now, except those in `avoid`: the ejected only
        if there are no others. like: that serve the same model."""
        usable = [
            replica
            for replica in self._replicas.values()
            if replica.usable and replica.target not in avoid and _alike(replica.engine, like)
        ]
        return [replica for replica in usable if not replica.ejected] or usable

    async def acquire(
        self,
        *,
        tokens: int,
        key: bytes,
        avoid: Collection[str] = (),
        like: EngineDescription | None = None,
    ) -> Replica:
        """What `pick` finds. Waits for there to be one, without a limit of its own."""
        while (found := self.pick(tokens=tokens, key=key, avoid=avoid, like=like)) is None:
            await self.changed.wait()
        return found

    def pick(
        self,
        *,
        tokens: int,
        key: bytes,
        avoid: Collection[str] = (),
        like: EngineDescription | None = None,
    ) -> Replica | None:
        """The replica for a generation of so many tokens whose prompt has this `prefix_key`; None
        if there is none now.

        An empty key is that of a prompt that is not known. avoid, like: as for `others`.
        """
        usable = self.others(avoid, like)
        if len(usable) < 2:
            return usable[0] if usable else None
        name = choose(
            [replica.load for replica in usable],
            key=key or secrets.token_bytes(16),
            tokens=tokens,
            affinity_tokens=self._config.affinity_tokens if key else 0,
        )
        return self._replicas[name]

    def notify(self) -> None:
        """Something about a replica may have changed."""
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def reason(self) -> str:
        """Why none can generate."""
        if not self._replicas:
            return "no address of a model server is known yet"
        reasons = [
            f"{replica.target}: {replica.reason if replica.engine is None else 'draining'}"
            for replica in self._replicas.values()
        ]
        return reasons[0].partition(": ")[2] if len(reasons) == 1 else "; ".join(reasons)

    def _update(self) -> None:
        """Have a replica for every address, and let those without one go."""
        wanted = dict.fromkeys(self._addresses.static)
        for found in self._found.values():
            wanted.update(dict.fromkeys(found))
        for target in wanted:
            if target not in self._replicas:
                self._add(target)
        for target, replica in self._replicas.items():
            replica.leaving = target not in wanted
        self.notify()

    def _add(self, target: str) -> None:
        replica = Replica(
            target,
            self._connect(target),
            self._config.limits,
            probe=self._probe,
            on_change=self.notify,
        )
        replica.draining = target in self._drained
        self._replicas[target] = replica
        self._watches[target] = asyncio.create_task(replica.watch())

    async def _remove(self, target: str) -> None:
        watch = self._watches.pop(target)
        watch.cancel()
        await asyncio.wait({watch})
        await self._replicas[target].client.close()
        del self._replicas[target]
        self.notify()

    async def _watch_progress(self) -> None:
        """Eject the replicas that stall, unless there is no other to go to."""
        while True:
            await asyncio.sleep(self._config.limits.stall_s / _STALL_LOOKS)
            stalled = [replica for replica in self.replicas if replica.stalled()]
            for replica in stalled:
                others = self.others({each.target for each in stalled}, replica.engine)
                if any(not other.ejected for other in others):
                    replica.eject()

    async def _watch_names(self) -> None:
        while True:
            for name in self._addresses.names:
                try:
                    found = await self._resolve(name, self._config.resolve_timeout_s)
                except DraftgateError as error:
                    self._complaints[name].tell(error.message)
                    continue
                self._complaints[name].over()
                self._found[name] = found
            self._update()
            for replica in self.replicas:
                if replica.leaving and not replica.generations:
                    await self._remove(replica.target)
            await asyncio.sleep(self._config.resolve_interval_s)


def _alike(engine: EngineDescription | None, like: EngineDescription | None) -> bool:
    """Whether a generation that began at the one can go on at the other."""
    if engine is None or like is None:
        return True
    return (engine.name, engine.vocab_size) == (like.name, like.vocab_size)
