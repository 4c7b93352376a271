"""Requests in Triton's protocol on their way to a replica: a place, a choice, and another one if
that replica is lost before it answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TypeVar

from draftgate._pb.inference import grpc_service_pb2 as pb
from draftgate.errors import DraftgateError, ErrorCode
from draftgate.gateway.admission import Place
from draftgate.gateway.passed_request import PassedRequest, leave_of_limits, read_request
from draftgate.gateway.sequences import Sequences, Turn
from draftgate.gateway.team import Admits
from draftgate.gateway.tenant import current_tenant
from draftgate.telemetry.codes import OK
from draftgate.telemetry.spans import PassedSpan
from draftgate.telemetry.tracing import Tracing
from draftgate.upstream.failures import means_lost
from draftgate.upstream.raw import UnansweredError
from draftgate.upstream.replica import Replica
from draftgate.upstream.replicas import ReplicaSet
from draftgate.upstream.types import EngineDescription

__all__ = ["Passing"]

T = TypeVar("T")
Send = Callable[[Replica, Place], Awaitable[T]]
"""Sends a request to a replica; adds to what the place has used whatever tokens come."""


class Passing:
    """All requests of such clients to one gateway."""

    def __init__(self, replicas: ReplicaSet, admission: Admits, tracing: Tracing) -> None:
        self._replicas = replicas
        self._admission = admission
        self._tracing = tracing
        self._sequences = Sequences()

    @property
    def serving(self) -> bool:
        """Whether any replica is ready."""
        return self._replicas.serving

    def read(self, request: pb.ModelInferRequest, time_left_ms: int | None) -> PassedRequest:
        """The request as it is to be run.

        Raises DraftgateError(UNAVAILABLE) while no replica is ready.
        """
        return read_request(
            request,
            tenant=current_tenant(),
            time_left_ms=time_left_ms,
            longest=self._replicas.engine.max_sequence_tokens,
        )

    @contextmanager
    def traced(self, request: pb.ModelInferRequest) -> Iterator[PassedSpan]:
        """The span of a request, ended with whatever ends it inside."""
        span = PassedSpan(self._tracing.tracer, request.model_name, request.id)
        code: str = ErrorCode.INTERNAL
        refusal = ""
        try:
            yield span
            code = OK
        except DraftgateError as error:
            code = error.code
            refusal = error.refusal.reason if error.refusal else ""
            raise
        except asyncio.CancelledError:
            code = ErrorCode.CANCELLED
            raise
        finally:
            span.end(code, refusal)

    async def run(
        self, passed: PassedRequest, span: PassedSpan, send: Send[T], *, at: Replica | None = None
    ) -> T:
        """What `send` brings, once there is a place for the request.

        A replica that is lost before it answered is no failure while there is another that would
        do. at: the only one that does.

        Raises DraftgateError: what `send` and `Admission.admitted` raise, DEADLINE_EXCEEDED if the
        request's own `timeout` ends its wait, UNAVAILABLE if there is no replica for it.
        """
        async with self._let_in(passed, span) as (turn, place):
            lost: set[str] = set()
            like: EngineDescription | None = None
            while True:
                replica = at or self._choose(passed, turn, lost, like)
                like = replica.engine
                try:
                    return await send(replica, place)
                except UnansweredError:
                    lost.add(replica.target)
                    if not self._replicas.others(lost, like):
                        raise

    async def ask(
        self, method: str, request: bytes, time_left_s: Callable[[], float | None]
    ) -> bytes:
        """What a replica answers to a call that infers nothing.

        Raises DraftgateError, with Triton's code and words if it spoke.
        """
        replica = self._replicas.named("")
        asked: set[str] = set()
        while True:
            asked.add(replica.target)
            try:
                return await replica.client.call_raw(method, request, timeout_s=time_left_s())
            except DraftgateError as error:
                others = self._replicas.others(asked, None)
                if not (others and means_lost(error)):
                    raise
                replica = others[0]

    async def ask_all(self, method: str, request: bytes, timeout_s: float | None) -> list[bytes]:
        """What each of the ready replicas answers; those that are lost meanwhile are left out.

        Raises DraftgateError as `ask` does, also if all were lost.
        """
        ready = [each for each in self._replicas.replicas if each.serving]
        if not ready:
            raise DraftgateError(ErrorCode.UNAVAILABLE, self._replicas.reason)
        found = await asyncio.gather(
            *(each.client.call_raw(method, request, timeout_s=timeout_s) for each in ready),
            return_exceptions=True,
        )
        answers = [each for each in found if isinstance(each, bytes)]
        failures = [each for each in found if isinstance(each, BaseException)]
        for failure in failures:
            if not answers or not (isinstance(failure, DraftgateError) and means_lost(failure)):
                raise failure
        return answers

    @asynccontextmanager
    async def _let_in(
        self, passed: PassedRequest, span: PassedSpan
    ) -> AsyncIterator[tuple[Turn, Place]]:
        if passed.stops:  # It makes room and takes none.
            yield Turn(), Place(0.0, 0)
            return
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(passed.timeout_s):
                    # First the turn: who held a place meanwhile might hold up the one before it.
                    turn = await held.enter_async_context(self._sequences.turn(passed.sequence))
                    place = await held.enter_async_context(self._admission.admitted(passed.ask))
            except TimeoutError as error:
                raise DraftgateError(
                    ErrorCode.DEADLINE_EXCEEDED,
                    f"timeout: the request waited {passed.timeout_s:g} s, the most that it allows,"
                    " and did not start",
                    field="timeout",
                ) from error
            if place.waited_s:
                span.waited(passed.ask.priority, place.waited_s)
                leave_of_limits(passed.request, place.waited_s)
            yield turn, place

    def _choose(
        self,
        passed: PassedRequest,
        turn: Turn,
        lost: set[str],
        like: EngineDescription | None,
    ) -> Replica:
        if turn.replica is not None and passed.sequence is not None:
            # Also one that is drained: it finishes what it has.
            if turn.replica in self._replicas.replicas and turn.replica.engine is not None:
                return turn.replica
            if not passed.sequence.start:
                raise DraftgateError(
                    ErrorCode.UNAVAILABLE,
                    f"sequence_id: the model server that has sequence {passed.sequence.key[2]!r} "
                    "is not ready",
                    field="sequence_id",
                )
        replica = self._replicas.pick(
            tokens=passed.ask.tokens, key=passed.key, avoid=lost, like=like
        ) or self._replicas.named("")
        turn.replica = replica
        return replica
