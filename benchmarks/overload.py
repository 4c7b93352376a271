"""Ten times the load that the engine can take: what those feel who run, and those who are refused.

Three processes: a scripted Triton with so many rows and a fixed step, `draftgate gateway` as it is
shipped, with traces of every call, and this one. First as many clients as there are rows, each
beginning anew when it has its answer; that is the capacity. Then new clients at ten times the pace
at which answers were complete then, whether or not anything is complete now.

    python benchmarks/overload.py [--quick] [--check] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
import uvloop

import scripted_triton
from common import Goal, Machine, benchmark_parser, conclude
from draftgate._pb.draftgate.v1 import generation_pb2, generation_pb2_grpc
from draftgate.cli.client import GatewayClient
from draftgate.cli.heap import freeze_heap
from served import Served, running

__all__ = ["Phase", "Plan", "Report", "goals", "main", "measure"]

_CHANNELS = 8
"""Connections that the clients share."""
_SAMPLE_S = 0.25
_SERVING_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rows: int = 32
    step_ms: float = 20.0
    tokens: int = 64
    """Of an answer."""
    capacity_s: float = 15.0
    overload_s: float = 60.0
    times: float = 10.0
    """How much more comes than can be served."""
    settle_s: float = 2.0
    """Of each phase, before anything counts."""


QUICK = Plan(capacity_s=8.0, overload_s=20.0)


@dataclass(frozen=True)
class Phase:
    """What the clients of one phase saw."""

    seconds: float
    arrivals: int
    """Calls that began and ended in it."""
    complete: int
    """Answers that came to their end in it."""
    refused: int
    """RESOURCE_EXHAUSTED."""
    failed: dict[str, int]
    """Any other status, by name."""
    gap_p50_ms: float
    """Between two events with tokens of one stream."""
    gap_p99_ms: float
    refusal_p50_ms: float | None
    """From the call to its status; None where nobody was refused."""
    refusal_p99_ms: float | None
    behind_p99_ms: float
    """How late this process itself was in beginning calls."""
    resident_mib: list[float]
    """Memory of the gateway that is its own, over time."""

    @property
    def growth(self) -> float:
        """The gateway's memory in the last fifth of the time over that in the second."""
        fifth = max(1, len(self.resident_mib) // 5)
        early = self.resident_mib[fifth : 2 * fifth] or self.resident_mib
        return statistics.median(self.resident_mib[-fifth:]) / statistics.median(early)


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    plan: Plan
    capacity: Phase
    overload: Phase


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure refusals and streams under ten times the load that can be served.",
        quick="20 s of overload",
    )
    options = parser.parse_args(argv)
    report = measure(plan or (QUICK if options.quick else Plan()))
    return conclude(options, report, goals(report), lambda: _print(report))


def measure(plan: Plan) -> Report:
    """Measure all that the plan says."""
    with ExitStack() as stack:
        triton = stack.enter_context(_scripted_triton(plan))
        command = ("gateway", "--listen", "127.0.0.1:0", "--model-name", scripted_triton.MODEL)
        options = ("--triton", triton, "--otlp-endpoint", triton)
        gateway = stack.enter_context(running((*command, *options)))
        freeze_heap()  # The pauses of this process are not the gateway's.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            capacity, overload = runner.run(_measure(plan, gateway))
    return Report(Machine.this(), plan, capacity, overload)


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    most, overload = float("inf"), report.overload
    return [
        Goal("refusals, p99, ms", overload.refusal_p99_ms or most, 0.0, 25.0),
        Goal(
            "p99 gap of admitted streams, overload / capacity",
            overload.gap_p99_ms / report.capacity.gap_p99_ms,
            0.0,
            1.25,
        ),
        Goal("gateway memory, last / second fifth", overload.growth, 0.0, 1.05),
        Goal("calls that failed in another way", float(sum(overload.failed.values())), 0.0, 0.0),
    ]


@dataclass
class _Seen:
    """What clients saw so far."""

    counts_from_s: float
    """Nothing before counts."""
    arrivals: int = 0
    complete: int = 0
    gaps_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    behind_s: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    resident_mib: list[float] = field(default_factory=list)

    def ended(self, begun_s: float, failure: grpc.aio.AioRpcError | None) -> None:
        """Count a call that ended now."""
        now_s = time.perf_counter()
        if failure is None:
            self.complete += now_s >= self.counts_from_s
        if begun_s < self.counts_from_s:
            return
        self.arrivals += 1
        if failure is not None and failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            self.refusals_s.append(now_s - begun_s)
        elif failure is not None:
            self.failed[failure.code().name] += 1

    def phase(self, seconds: float) -> Phase:
        gap_p50_ms, gap_p99_ms = _percentiles_ms(self.gaps_s)
        refusals: tuple[float | None, float | None] = (None, None)
        if self.refusals_s:
            refusals = _percentiles_ms(self.refusals_s)
        return Phase(
            seconds=seconds,
            arrivals=self.arrivals,
            complete=self.complete,
            refused=len(self.refusals_s),
            failed=dict(self.failed),
            gap_p50_ms=gap_p50_ms,
            gap_p99_ms=gap_p99_ms,
            refusal_p50_ms=refusals[0],
            refusal_p99_ms=refusals[1],
            behind_p99_ms=_percentiles_ms(self.behind_s or [0.0])[1],
            resident_mib=self.resident_mib,
        )


def _percentiles_ms(samples_s: Sequence[float]) -> tuple[float, float]:
    """Its median and its p99."""
    middle, high = np.percentile(np.array(samples_s) * 1e3, (50, 99))
    return float(middle), float(high)


_Load = Callable[[_Seen], Awaitable[None]]
"""Goes on until it is cancelled."""


async def _measure(plan: Plan, gateway: Served) -> tuple[Phase, Phase]:
    async with GatewayClient(gateway.address) as client:
        await client.serving(timeout_s=_SERVING_TIMEOUT_S)
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [
        grpc.aio.insecure_channel(gateway.address, options=options) for _ in range(_CHANNELS)
    ]
    try:
        stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
        clients = _Clients(plan, itertools.cycle(stubs))
        capacity = await _phase(plan, gateway, plan.capacity_s, clients.as_many_as_rows)
        clients.per_s = plan.times * capacity.complete / capacity.seconds
        overload = await _phase(plan, gateway, plan.overload_s, clients.too_many)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return capacity, overload


async def _phase(plan: Plan, gateway: Served, seconds: float, load: _Load) -> Phase:
    seen = _Seen(time.perf_counter() + plan.settle_s)
    running_load = asyncio.ensure_future(load(seen))
    end_s = seen.counts_from_s + seconds
    try:
        while (now_s := time.perf_counter()) < end_s:
            if now_s >= seen.counts_from_s:
                seen.resident_mib.append(gateway.resident_bytes / 2**20)
            await asyncio.wait([running_load], timeout=_SAMPLE_S)
            if running_load.done():
                running_load.result()
        # Before the calls that still run are cancelled here, which is nobody's failure.
        return seen.phase(seconds)
    finally:
        running_load.cancel()
        await asyncio.wait([running_load])


@dataclass
class _Clients:
    """Everybody who calls."""

    plan: Plan
    stubs: Iterator[generation_pb2_grpc.GenerationServiceStub]
    per_s: float = 0.0
    """How many come a second, where there are too many."""

    async def as_many_as_rows(self, seen: _Seen) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(self.plan.rows):
                clients.create_task(self._again_and_again(seen))

    async def too_many(self, seen: _Seen) -> None:
        intervals = random.Random(0)
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            while True:
                due_s += intervals.expovariate(self.per_s)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                seen.behind_s.append(time.perf_counter() - due_s)
                calls.create_task(self._call(seen))

    async def _again_and_again(self, seen: _Seen) -> None:
        while True:
            await self._call(seen)

    async def _call(self, seen: _Seen) -> None:
        request = generation_pb2.GenerateRequest(prompt="Hi", max_tokens=self.plan.tokens)
        begun_s = time.perf_counter()
        call = next(self.stubs).Generate(request)
        failure: grpc.aio.AioRpcError | None = None
        last_s: float | None = None
        try:
            async for event in call:
                if event.HasField("tokens"):
                    now_s = time.perf_counter()
                    if last_s is not None and last_s >= seen.counts_from_s:
                        seen.gaps_s.append(now_s - last_s)
                    last_s = now_s
        except grpc.aio.AioRpcError as error:
            failure = error
        finally:
            call.cancel()  # Without effect once it is over.
        seen.ended(begun_s, failure)


@contextmanager
def _scripted_triton(plan: Plan) -> Iterator[str]:
    """The address of a process of its own. Raises RuntimeError if it does not start."""
    arguments = (str(plan.rows), str(plan.step_ms))
    with subprocess.Popen(
        [sys.executable, scripted_triton.__file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("the scripted Triton ended early")
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.stdin.close()


def _print(report: Report) -> None:
    plan, machine = report.plan, report.machine
    print(
        f"{plan.rows} rows, a step of {plan.step_ms:g} ms, answers of {plan.tokens} tokens, "
        f"on {machine.cpu}, {machine.cores} cores\n"
    )
    print(f"{'':<10}    calls/s answers/s refused/s  gap p50   p99 ms  refusal p50   p99 ms    MiB")
    for name, phase in (("capacity", report.capacity), ("overload", report.overload)):
        refusals = "            -        -"
        if phase.refusal_p50_ms is not None and phase.refusal_p99_ms is not None:
            refusals = f"{phase.refusal_p50_ms:13.1f}{phase.refusal_p99_ms:9.1f}"
        print(
            f"{name:<10}{phase.arrivals / phase.seconds:11.1f}"
            f"{phase.complete / phase.seconds:10.1f}{phase.refused / phase.seconds:10.1f}"
            f"{phase.gap_p50_ms:9.1f}{phase.gap_p99_ms:9.1f}{refusals}"
            f"{phase.resident_mib[-1]:7.1f}"
        )
    print(f"\nthis process began calls up to {report.overload.behind_p99_ms:.1f} ms late (p99)\n")


if __name__ == "__main__":
    raise SystemExit(main())
