"""One Triton endpoint: whether it is well, what it has to do, and the generations on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from draftgate.errors import DraftgateError, ErrorCode
from draftgate.sampling import SamplingParams
from draftgate.upstream.balance import Load, prompt_tokens, slow_start_weight
from draftgate.upstream.breaker import Breaker, BreakerLimits, BreakerState
from draftgate.upstream.client import TritonClient
from draftgate.upstream.complaint import Complaint
from draftgate.upstream.generation import Generation
from draftgate.upstream.probe import not_ready_reason
from draftgate.upstream.types import Chunk, EngineDescription, GenerationRequest, TextPrompt

__all__ = ["Attempt", "Probe", "Replica", "ReplicaLimits", "ReplicaState", "Work"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """How a replica is asked whether it is ready."""

    interval_s: float = 1.0
    """Time between two looks."""
    timeout_s: float = 5.0
    """How long it may take to answer."""


@dataclass(frozen=True)
class ReplicaLimits:
    """When a replica counts as lost, and how it comes back."""

    stall_s: float = 10.0
    """How long it may emit nothing at all while generations that have begun run on it."""
    first_chunk_stall_s: float = 60.0
    """The same while they all still wait for their first token: a long prompt takes its time."""
    slow_start_s: float = 10.0
    """How long a replica that became ready gets less than its share."""
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    """When it is ejected for losing generations, and how it comes back."""


class ReplicaState(StrEnum):
    """What an operator wants to know of a replica first."""

    NOT_READY = "not ready"
    READY = "ready"
    PROBATION = "probation"
    """Ready again after it was ejected: the next failure ejects it for longer."""
    EJECTED = "ejected"
    """It lost or stalled generations; it is only used where nothing else is left."""
    DRAINING = "draining"
    """It takes no new generations, because an operator said so or its address is gone."""


class Work(Protocol):
    """What runs on a replica and is part of its load."""

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of the prompt to read and tokens still to emit."""

    @property
    def began(self) -> bool:
        """Whether anything came."""

    @property
    def awaited(self) -> bool:
        """Whether something has to come, now and then, or the replica stalls."""

    @property
    def movable(self) -> bool:
        """Whether it goes on elsewhere if it is sent away."""

    def send_away(self, error: DraftgateError) -> None:
        """End it here."""


class Replica:
    """One endpoint. `watch` has to run, or it never becomes ready."""

    def __init__(
        self,
        target: str,
        client: TritonClient,
        limits: ReplicaLimits,
        *,
        probe: Probe,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` hears whenever something about it may have changed."""
        self.target = target
        self.client = client
        self.engine: EngineDescription | None = None
        """What it serves; None while it is not ready."""
        self.reason = "the gateway is starting"
        """Why it is not ready."""
        self.draining = False
        """An operator wants no new generations on it."""
        self.leaving = False
        """Its address is gone: it ends once nothing runs on it any more."""
        self.ejections = 0
        self.resumes = 0
        """Generations that it lost and that went on from what was emitted."""
        self._limits = limits
        self._probe = probe
        self._on_change = on_change
        self._breaker = Breaker(limits.breaker)
        self._complaint = Complaint(
            _log,
            what=f"replica {target} is not ready",
            over=f"replica {target} is ready again",
            fields={"replica": target},
        )
        self._works: set[Work] = set()
        self._suspect = False
        self._look_now = asyncio.Event()
        self._ready_since_s = 0.0
        self._received = 0
        self._moved_s = _now_s()

    @property
    def usable(self) -> bool:
        """Whether it may get a generation now."""
        return self.serving and not self._suspect

    @property
    def serving(self) -> bool:
        """The same, but for a look at it that is under way after it lost a generation."""
        return self.engine is not None and not self.draining and not self.leaving

    @property
    def ejected(self) -> bool:
        return self._breaker.state(_now_s()) is BreakerState.OPEN

    @property
    def state(self) -> ReplicaState:
        if self.draining or self.leaving:
            return ReplicaState.DRAINING
        if self.engine is None:
            return ReplicaState.NOT_READY
        return {
            BreakerState.CLOSED: ReplicaState.READY,
            BreakerState.OPEN: ReplicaState.EJECTED,
            BreakerState.PROBATION: ReplicaState.PROBATION,
        }[self._breaker.state(_now_s())]

    @property
    def generations(self) -> int:
        """How many run on it."""
        return len(self._works)

    @property
    def load(self) -> Load:
        """What it has to do."""
        tokens = sum(work.outstanding_tokens for work in self._works)
        weight = slow_start_weight(_now_s() - self._ready_since_s, self._limits.slow_start_s)
        return Load(self.target, tokens, weight)

    async def watch(self) -> None:
        """Look at it again and again, until cancelled."""
        while True:
            self._look_now.clear()
            await self._look()
            try:
                async with asyncio.timeout(self._probe.interval_s):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    @contextmanager
    def carrying(self, work: Work) -> Iterator[None]:
        """`work` runs on it, inside."""
        self._works.add(work)
        try:
            yield
        finally:
            self._works.discard(work)

    def moved(self) -> None:
        """A generation on it brought its first tokens."""
        self._breaker.succeeded()

    def lost(self) -> None:
        """A generation on it was lost: it gets no more before it has been looked at again."""
        self._suspect = True
        self._look_now.set()
        if self._breaker.failed(_now_s()):
            self._note_ejection("it loses generations")
        self._on_change()

    def stalled(self) -> bool:
        """Whether generations that should move do not; to be asked again and again."""
        waiting = [each for each in self._works if each.awaited]
        received = self.client.chunks_received
        now_s = _now_s()
        if not waiting or received != self._received:
            self._received, self._moved_s = received, now_s
            return False
        moving = self.engine is None or any(each.began for each in waiting)
        limit_s = self._limits.stall_s if moving else self._limits.first_chunk_stall_s
        return now_s - self._moved_s >= limit_s

    def eject(self) -> None:
        """It stalls: it gets nothing more, and what runs on it has to go on elsewhere."""
        if self._breaker.trip(_now_s()):
            self._note_ejection("it emits nothing")
        self._send_away(self._works, "the model server emits nothing")

    def move(self, reason: str) -> None:
        """End what runs on it and can go on elsewhere, so that it does."""
        self._send_away([work for work in self._works if work.movable], reason)

    def _send_away(self, works: Iterable[Work], reason: str) -> None:
        for work in tuple(works):
            work.send_away(DraftgateError(ErrorCode.UNAVAILABLE, reason))
        self._on_change()

    def _note_ejection(self, reason: str) -> None:
        self.ejections += 1
        _log.warning("replica %s is ejected: %s", self.target, reason)

    async def _look(self) -> None:
        was_ready = self.engine is not None
        self.engine = await self._described()
        if not self._look_now.is_set():  # Else it was lost while this look was under way.
            self._suspect = False
        if self.engine is not None and not was_ready:
            self._ready_since_s = _now_s()
            self._breaker.hasten()
            if not self._complaint.over():
                _log.info("replica %s is ready", self.target, extra={"replica": self.target})
        if self.engine is not None and self._breaker.trial_due(_now_s()):
            await self._try()
        self._on_change()

    async def _described(self) -> EngineDescription | None:
        level = logging.WARNING
        try:
            if self.engine is None:
                # It may be another server than before, with other models.
                await self.client.find_profile(self._probe.timeout_s)
            reason = await not_ready_reason(self.client, self._probe.timeout_s)
            if not reason:
                return self.engine or await self.client.describe()
        except DraftgateError as error:
            reason = error.message
            if error.code is ErrorCode.FAILED_PRECONDITION:
                level = logging.ERROR  # It does not go by itself: an entry that is not there, say.
        except Exception:  # noqa: BLE001 - logged with its traceback
            # Not foreseen, but a watcher that ended would leave its last word standing for ever.
            _log.exception("looking at the model server failed")
            reason = "the gateway failed to look at the model server"
        self.reason = reason
        self._complaint.tell(reason, level=level)
        return None

    async def _try(self) -> None:
        """Let it emit one token: readiness alone does not say that its engine moves."""
        request = GenerationRequest(
            request_id="trial",
            prompt=TextPrompt("a"),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
        )
        try:
            async with (
                asyncio.timeout(self._limits.stall_s),
                self.client.generate(request).started() as chunks,
            ):
                moved = any([chunk.token_ids async for chunk in chunks])
        except (DraftgateError, TimeoutError):
            moved = False
        if moved:
            self._breaker.trial_succeeded(_now_s())
            self._ready_since_s = _now_s()
            _log.info("replica %s emits again: it is on probation", self.target)
        else:
            self._breaker.trial_failed(_now_s())


class Attempt:
    """A generation on one replica, part of its load while it runs."""

    def __init__(self, replica: Replica, request: GenerationRequest) -> None:
        self.replica = replica
        self.generation = replica.client.generate(request)
        self.moved = False
        """Whether it brought tokens."""
        self.sent_away = False
        """Whether it was ended so that it goes on elsewhere: its replica did not lose it."""
        self._prompt_tokens = prompt_tokens(request.prompt)
        self._tokens = request.sampling.max_tokens - request.resume_len

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of the prompt to read and tokens still to emit."""
        return self._prompt_tokens + max(0, self._tokens)

    @property
    def began(self) -> bool:
        return self.generation.began

    @property
    def awaited(self) -> bool:
        return not self.generation.ended

    @property
    def movable(self) -> bool:
        return True

    def send_away(self, error: DraftgateError) -> None:
        self.sent_away = True
        self.generation.abandon(error)

    @asynccontextmanager
    async def started(self, metadata: Sequence[tuple[str, str]]) -> AsyncIterator[Generation]:
        """Run it; every chunk is to be handed to `count`."""
        with self.replica.carrying(self):
            async with self.generation.started(metadata) as chunks:
                yield chunks

    def count(self, chunk: Chunk) -> None:
        """Its tokens are not outstanding any more."""
        self._prompt_tokens = 0
        self._tokens -= len(chunk.token_ids)
        if chunk.token_ids and not self.moved:
            self.moved = True
            self.replica.moved()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
