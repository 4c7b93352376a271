"""What the gateway adds to a stream: CPU, latency, time to the first token, memory.

A scripted backend sends one message a stream every 20 ms to 64 streams, in Triton's protocol with
the tensors of the `draftgate` profile. In turn, many times over, the same load goes straight to the
backend, through a bare grpc.aio relay (one message in, one text out), and through the gateway with
everything on: handing on each message alone, with steps that speculate, and making several messages
one. Backend, relay, gateway and load are processes of their own; CPU is that of the process in the
middle. Then 1,000 streams are opened that bring one event and wait, for the memory of each.

    python benchmarks/gateway_overhead.py [--quick] [--check] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import uvloop

from common import Goal, Machine, benchmark_parser, conclude
from overhead_load import Measured, Server, held_open, measured, served
from overhead_servers import prompt

__all__ = ["CASES", "Plan", "Report", "goals", "main", "measure"]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    streams: int = 64
    interval_ms: float = 20.0
    """Between two messages of a stream. So often a stream begins, a little later each: no two send
    together, and the time to the first token is not that of a crowd at the door."""
    rounds: int = 8
    """Over all cases, each time in another order."""
    seconds: float = 5.0
    """How long a case is measured in a round."""
    draft_len: int = 3
    """Drafts of a step that speculates: as many tokens come of it."""
    max_delay_ms: float = 100.0
    """Longest that a message waits to be made one with others, where it may."""
    idle_streams: int = 1000
    """0: memory is not measured."""


QUICK = Plan(rounds=2, seconds=1.5, idle_streams=200)


@dataclass(frozen=True)
class Case:
    """One way from the backend to the client."""

    kind: str
    """Whom the client speaks to: direct, relay or gateway."""
    coalescing: bool = False
    speculating: bool = False


CASES: Mapping[str, Case] = {
    "direct": Case("direct"),
    "relay": Case("relay"),
    "gateway": Case("gateway"),
    "gateway, speculating": Case("gateway", speculating=True),
    "gateway, coalescing": Case("gateway", coalescing=True),
}


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    plan: Plan
    rounds: Sequence[Mapping[str, Measured]]
    idle_stream_bytes: float | None

    def cpu_ratio(self, case: str) -> float:
        """A case's CPU time over the relay's: the median of the rounds' ratios, since the machine
        may be faster in one round than in the next."""
        return statistics.median(each[case].cpu_us / each["relay"].cpu_us for each in self.rounds)

    def added_ms(self, case: str, what: str) -> float:
        """What a case adds to a figure of the direct way: the median of the rounds' differences."""
        return statistics.median(
            getattr(each[case], what) - getattr(each["direct"], what) for each in self.rounds
        )

    def median(self, case: str, what: str) -> float:
        """The median of a case's figure over the rounds."""
        return statistics.median(getattr(each[case], what) for each in self.rounds)


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure what the gateway adds to a stream.", quick="few rounds, fewer idle streams"
    )
    options = parser.parse_args(argv)
    report = measure(plan or (QUICK if options.quick else Plan()))
    return conclude(options, report, goals(report), lambda: _print(report))


def measure(plan: Plan) -> Report:
    """Measure all that the plan says."""
    with ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        backend = stack.enter_context(served("backend"))
        never, always = ("1", "0"), ("0", str(plan.max_delay_ms))
        servers = {
            "direct": backend,
            "relay": stack.enter_context(served("relay", backend.address)),
            "gateway": stack.enter_context(served("gateway", backend.address, *never)),
            "coalescing": stack.enter_context(served("gateway", backend.address, *always)),
        }
        rounds = [
            {name: runner.run(_case(plan, name, servers)) for name in _order(number)}
            for number in range(plan.rounds)
        ]
        idle_bytes = None
        if plan.idle_streams:
            # One that has done nothing yet: what it has freed would be used again.
            fresh = stack.enter_context(served("gateway", backend.address, *never))
            idle = held_open(fresh, prompt=prompt(0), streams=plan.idle_streams)
            idle_bytes = runner.run(idle)
    return Report(Machine.this(), plan, rounds, idle_bytes)


async def _case(plan: Plan, name: str, servers: Mapping[str, Server]) -> Measured:
    case = CASES[name]
    server = servers["coalescing" if case.coalescing else case.kind]
    return await measured(
        case.kind,
        server,
        prompt=prompt(plan.interval_ms, plan.draft_len if case.speculating else 0),
        streams=plan.streams,
        spread_s=plan.interval_ms / 1000 * (plan.streams + 1),
        seconds=plan.seconds,
        backend=servers["direct"],
    )


def _order(number: int) -> list[str]:
    """Another order each time: each case comes first, and after each other, in turn."""
    names = list(CASES)
    shift = number % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if number % 2 else order


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    none = float("-inf")
    found = [
        Goal("CPU of a message, gateway / relay", report.cpu_ratio("gateway"), none, 1.15),
        Goal(
            "CPU of a message, coalescing / relay",
            report.cpu_ratio("gateway, coalescing"),
            none,
            0.6,
        ),
        Goal("added p50 latency, ms", report.added_ms("gateway", "p50_ms"), none, 0.8),
        Goal("added TTFT, ms", report.added_ms("gateway", "ttft_ms"), none, 2.0),
    ]
    if report.idle_stream_bytes is not None:
        found.append(Goal("kB of an idle stream", report.idle_stream_bytes / 1000, none, 150.0))
    return found


def _print(report: Report) -> None:
    plan = report.plan
    print(f"{report.machine.cpu}, {report.machine.cores} cores, uvloop")
    print(
        f"{plan.streams} streams, a message every {plan.interval_ms:g} ms; medians of "
        f"{plan.rounds} rounds of {plan.seconds:g} s\n"
    )
    print(
        f"{'':<22}{'CPU us/message':>15}{'/ relay':>9}{'p50 ms':>8}{'added':>7}{'p99 ms':>8}"
        f"{'TTFT ms':>9}{'messages/event':>16}{'cores':>7}"
    )
    for name in CASES:
        found = {what: report.median(name, what) for what in Measured.__dataclass_fields__}
        print(
            f"{name:<22}{found['cpu_us']:15.1f}{report.cpu_ratio(name):9.2f}"
            f"{found['p50_ms']:8.2f}{report.added_ms(name, 'p50_ms'):7.2f}{found['p99_ms']:8.2f}"
            f"{found['ttft_ms']:9.2f}{found['messages'] / found['events']:16.2f}"
            f"{found['cores']:7.2f}"
        )
    if report.idle_stream_bytes is not None:
        print(f"\nmemory of an idle stream: {report.idle_stream_bytes / 1000:.0f} kB")
    print()


if __name__ == "__main__":
    raise SystemExit(main())
