"""The gate's service of the scripted gateway: as strict as the real one about what it is asked."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from draftgate._pb.draftgate.v1 import gate_pb2 as pb
from draftgate._pb.draftgate.v1 import generation_pb2
from draftgate._pb.draftgate.v1.gate_pb2_grpc import GateServiceServicer

__all__ = ["End", "FakeGateService", "a_state", "a_step"]


@dataclass(frozen=True)
class End:
    """What a watch ends with, in its script."""

    code: grpc.StatusCode
    details: str


class FakeGateService(GateServiceServicer):
    """Says what it is told to. A watch that comes to the end of its script waits."""

    def __init__(self) -> None:
        self.state = a_state()
        """What GetState says; SetPolicy changes its policy."""
        self.states: Sequence[pb.GateState | End] = ()
        """What WatchState says."""
        self.batches: deque[pb.WatchStepsResponse | End] = deque()
        """What WatchSteps says, after its first and empty answer."""
        self.set: list[pb.SetPolicyRequest] = []
        self.refusal = End(grpc.StatusCode.OK, "")
        """What SetPolicy fails with."""
        self.intervals_ms: list[int] = []
        self.cancelled = asyncio.Event()
        """Set when the caller of a watch has gone."""

    async def GetState(  # noqa: N802
        self, request: pb.GetStateRequest, context: Any
    ) -> pb.GetStateResponse:
        return pb.GetStateResponse(state=self.state)

    async def SetPolicy(  # noqa: N802
        self, request: pb.SetPolicyRequest, context: Any
    ) -> pb.SetPolicyResponse:
        self.set.append(request)
        if self.refusal.code is not grpc.StatusCode.OK:
            await context.abort(self.refusal.code, self.refusal.details)
        fixed = request.policy.mode == pb.GATE_MODE_FIXED
        if not request.HasField("policy") or request.policy.HasField("draft_len") != fixed:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a whole policy")
        self.state.policy.CopyFrom(request.policy)
        return pb.SetPolicyResponse(state=self.state)

    async def WatchState(  # noqa: N802
        self, request: pb.WatchStateRequest, context: Any
    ) -> AsyncIterator[pb.WatchStateResponse]:
        await self._check(request, context)
        try:
            for each in self.states:
                await _end(each, context)
                yield pb.WatchStateResponse(state=each)
            await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def WatchSteps(  # noqa: N802
        self, request: pb.WatchStepsRequest, context: Any
    ) -> AsyncIterator[pb.WatchStepsResponse]:
        await self._check(request, context)
        try:
            yield pb.WatchStepsResponse()
            while self.batches:
                batch = self.batches.popleft()
                await _end(batch, context)
                yield batch
            await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def _check(
        self, request: pb.WatchStateRequest | pb.WatchStepsRequest, context: Any
    ) -> None:
        self.intervals_ms.append(request.interval_ms)
        if not 50 <= request.interval_ms <= 60_000:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"interval_ms: got {request.interval_ms}, allowed: an integer 50 to 60000",
            )


async def _end(each: object, context: Any) -> None:
    if isinstance(each, End):
        await context.abort(each.code, each.details)


def a_state(**fields: Any) -> pb.GateState:
    """A busy server's gate."""
    state = pb.GateState(
        policy=pb.GatePolicy(mode=pb.GATE_MODE_AUTO, max_step_ms=60.0),
        draft_len=2,
        reason=generation_pb2.GATE_REASON_GAIN,
        rows=3,
        steps=1200,
        switches=4,
        expected_step_ms=44.0,
        measured_step_ms=45.5,
        expected_speedup=1.42,
        emitted_tokens=4000,
        uptime_s=700.0,
        running_rows=3,
        waiting_rows=1,
        kv_used_tokens=1024,
        kv_total_tokens=4096,
        verify_steps=1000,
        drafted_tokens=2000,
        accepted_tokens=1100,
        acceptance=[
            pb.GateAcceptance(
                draft_source=generation_pb2.DRAFT_SOURCE_EAGLE, rates=[0.68, 0.61, 0.5]
            ),
            pb.GateAcceptance(
                draft_source=generation_pb2.DRAFT_SOURCE_NGRAM, rates=[0.83, 0.75, 0.7]
            ),
        ],
        candidates=[
            pb.GateCandidate(draft_len=0, tokens=3.0, step_ms=38.0),
            pb.GateCandidate(draft_len=2, tokens=5.5, step_ms=44.0),
        ],
        reasons=[
            pb.GateReasonCount(reason=generation_pb2.GATE_REASON_GAIN, steps=1100),
            pb.GateReasonCount(reason=generation_pb2.GATE_REASON_DWELL, steps=100),
        ],
        costs=pb.GateCosts(
            source="some CPU; fake; ngram",
            age_s=125.0,
            corrections=[pb.GateCorrection(tokens=6, drafted=True, ratio=1.07, observations=20)],
        ),
    )
    state.MergeFrom(pb.GateState(**fields))
    return state


def a_step(number: int) -> pb.GateStep:
    return pb.GateStep(
        step=number,
        time_s=number / 16,
        rows=2,
        prefill_tokens=5,
        kv_tokens=300,
        draft_len=2,
        reason=generation_pb2.GATE_REASON_LOW_ACCEPTANCE,
        drafted_tokens=4,
        accepted_tokens=3,
        emitted_tokens=5,
        outcomes=[
            pb.GateOutcome(draft_source=1, drafted_tokens=2, accepted_tokens=2),
            pb.GateOutcome(draft_source=2, drafted_tokens=2, accepted_tokens=1),
        ],
        expected_ms=44.0,
        measured_ms=45.5,
    )
