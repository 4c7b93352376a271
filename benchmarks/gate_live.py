"""The load gate on the real engine, through Triton and the gateway, against fixed draft lengths.

Streams in a closed loop, 1 to 32 at a time, on prompts never trained on: the gate, fixed draft
lengths, gates whose cost table is wrong, and, for what the gate costs where it never drafts, an
engine without a drafter, in turn, many times over, the same prompts for all; a load that rises and
falls; and the gap between chunks under a ceiling.

    python benchmarks/gate_live.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                   [--drafter-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import Goal, Machine, benchmark_parser, conclude
from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate.cli.client import GatewayClient
from draftgate.speculation import CostTable
from gate_load import Job, Window, closed_loop, settle
from held_out import add_folders, held_out_prompts
from served import serving

__all__ = [
    "CHAT",
    "FIXED",
    "GATES",
    "Ceiling",
    "Level",
    "Plan",
    "Report",
    "goals",
    "main",
    "measure",
]

_FIXED = {
    "K=0": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF),
    "K=2": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=2),
    "K=4": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=4),
}
FIXED = tuple(_FIXED)

_FALSE = {"too cheap": 1 / 1.6, "too dear": 1.6}
"""Gates with a wrong table: what it has the times of steps with drafts multiplied with."""
GATES = ("auto", *_FALSE)

_NEVER = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO, max_draft_len=0)
"""A gate that decides, and can decide on nothing but no drafts."""
_TAXED, _UNTAXED = "never", "no drafter"

_ROWS = 32
CHAT = "1 stream, chat"


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Streams at a time."""
    rounds: int = 4
    """Over all cases, each time in another order and with other prompts."""
    jobs_a_stream: int = 2
    least_jobs: int = 4
    tokens: tuple[int, ...] = (64, 32, 96, 48, 80)
    """Longest answers, in turn: rows end one by one."""
    ramp: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1)
    """Streams, one level after the other; none: no ramp."""
    ramp_rounds: int = 3
    ramp_s: float = 2.5
    """Of each level."""
    false_levels: tuple[int, ...] = (1, 8, 32)
    """Levels at which gates with a wrong table are measured."""
    false_steps: int = 300
    """After so many steps of a level they have to have found out."""
    tax_levels: tuple[int, ...] = (1, 32)
    ceiling_streams: int = 8
    """Streams with a ceiling on the gap; 0: not measured."""
    ceiling_s: float = 15.0


QUICK = Plan(
    levels=(1, 4),
    rounds=1,
    jobs_a_stream=1,
    least_jobs=2,
    tokens=(32, 48),
    ramp=(),
    false_levels=(),
    tax_levels=(),
    ceiling_streams=0,
)


@dataclass(frozen=True)
class Level:
    """So many streams."""

    name: str
    rounds: Sequence[Mapping[str, float]]
    """Tokens/s of each case, by round."""
    draft_lens: Mapping[str, float]
    """Drafted tokens a chunk, by case."""

    @property
    def cases(self) -> Sequence[str]:
        return list(self.rounds[0])

    @property
    def best_fixed(self) -> str:
        """The fixed draft length with the most tokens/s."""
        return max(FIXED, key=self.tokens_per_s)

    def tokens_per_s(self, case: str) -> float:
        """The median of the rounds."""
        return statistics.median(each[case] for each in self.rounds)

    def ratio(self, case: str, other: str) -> float:
        """One case's tokens/s over another's: the median of the rounds' ratios, since the machine
        may be faster in one round than in the next."""
        return statistics.median(each[case] / each[other] for each in self.rounds)


@dataclass(frozen=True)
class Ceiling:
    """Gaps between the chunks of a stream under a ceiling on steps."""

    streams: int
    max_step_ms: float
    p99_ms: Mapping[str, float]
    """By case; the gate's is that with the ceiling."""


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    plan: Plan
    levels: tuple[Level, ...]
    ceiling: Ceiling | None


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure the load gate on the real engine, through Triton and the gateway.",
        quick="two levels, one round",
    )
    add_folders(parser)
    options = parser.parse_args(argv)
    report = asyncio.run(measure(options, plan or (QUICK if options.quick else Plan())))
    return conclude(options, report, goals(report), lambda: _print(report))


async def measure(options: argparse.Namespace, plan: Plan) -> Report:
    """Measure all that the plan says."""
    tasks = held_out_prompts(options.model_dir)
    mixed = [ids for _, ids in tasks]
    chat = [ids for task, ids in tasks if task == "chat"]
    with ExitStack() as services:
        async with AsyncExitStack() as clients:
            runs = _Runs(plan, options, services, clients)
            await runs.start()
            levels = [await runs.level(f"{n} streams", mixed, n) for n in plan.levels]
            if 1 in plan.levels:
                levels.append(await runs.level(CHAT, chat, 1))
            if plan.ramp:
                levels.append(await runs.ramp(mixed))
            ceiling = await runs.ceiling(mixed) if plan.ceiling_streams else None
    return Report(
        machine=Machine.this(),
        model=options.model_dir.name,
        plan=plan,
        levels=tuple(levels),
        ceiling=ceiling,
    )


@dataclass(frozen=True)
class _Case:
    """Which service, and what its gate is told."""

    client: GatewayClient
    policy: gate_pb2.GatePolicy | None


class _Runs:
    """Services, and what is measured on them."""

    def __init__(
        self,
        plan: Plan,
        options: argparse.Namespace,
        services: ExitStack,
        clients: AsyncExitStack,
    ) -> None:
        self._plan = plan
        self._options = options
        self._services = services
        self._clients = clients
        self._folder = Path(services.enter_context(tempfile.TemporaryDirectory()))
        self._cache = self._folder / "cache"
        self._cases: dict[str, _Case] = {}
        self._turns = 0

    async def start(self) -> None:
        """Start a service for each kind of engine."""
        plan = self._plan
        gate = await self._service("--gate", "auto")
        # Another one: a gate must not learn from what it did not choose.
        fixed = await self._service("--gate", "auto")
        self._cases = {name: _Case(fixed, policy) for name, policy in _FIXED.items()}
        self._cases["auto"] = _Case(gate, None)
        if plan.false_levels:
            for name, factor in _FALSE.items():
                costs = self._falsified(name, factor)
                false = await self._service("--gate", "auto", "--costs", str(costs))
                self._cases[name] = _Case(false, None)
        if plan.tax_levels:
            self._cases[_TAXED] = _Case(fixed, _NEVER)
            self._cases[_UNTAXED] = _Case(await self._service("--drafter", "none"), None)

    async def level(self, name: str, prompts: Sequence[Sequence[int]], streams: int) -> Level:
        """So many streams in every case, in interleaved rounds."""
        plan, cases = self._plan, ["auto", *FIXED]
        if streams in plan.false_levels:
            for case in _FALSE:
                cases.append(case)
                jobs = self._jobs(prompts, streams, plan.rounds)
                await settle(self._cases[case].client, jobs, streams, plan.false_steps)
        if streams in plan.tax_levels and name != CHAT:
            cases += [_TAXED, _UNTAXED]

        async def run(case: _Case, number: int) -> Window:
            return await closed_loop(case.client, self._jobs(prompts, streams, number), streams)

        return await self._rounds(name, cases, plan.rounds, run)

    async def ramp(self, prompts: Sequence[Sequence[int]]) -> Level:
        """A load that rises and falls, without a pause between the levels."""
        plan = self._plan

        async def run(case: _Case, number: int) -> Window:
            whole = Window(max(plan.ramp), 0.0)
            for place, streams in enumerate(plan.ramp):
                jobs = self._jobs(prompts, streams, number + place)
                whole.add(await closed_loop(case.client, jobs, streams, plan.ramp_s))
            return whole

        name = f"ramp 1 to {max(plan.ramp)} to 1"
        return await self._rounds(name, ["auto", *FIXED], plan.ramp_rounds, run)

    async def ceiling(self, prompts: Sequence[Sequence[int]]) -> Ceiling:
        """Gaps with the gate under a ceiling half-way between those of K = 0 and of K = 4."""
        plan, p99_ms, limit_ms = self._plan, dict[str, float](), 0.0
        jobs = self._jobs(prompts, plan.ceiling_streams, 0)
        for name in ("K=0", "K=4", "auto"):
            client, policy = self._cases[name].client, self._cases[name].policy
            if name == "auto":
                limit_ms = (p99_ms["K=0"] + p99_ms["K=4"]) / 2
                policy = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO, max_step_ms=limit_ms)
            await _tell(client, policy)
            window = await closed_loop(client, jobs, plan.ceiling_streams, plan.ceiling_s)
            p99_ms[name] = float(np.percentile(window.gaps_ms, 99))
        return Ceiling(plan.ceiling_streams, limit_ms, p99_ms)

    async def _rounds(
        self,
        level: str,
        cases: Sequence[str],
        rounds: int,
        run: Callable[[_Case, int], Awaitable[Window]],
    ) -> Level:
        """Run all cases, again and again, each time in another order."""
        speeds, totals = [], {case: Window(0, 0.0) for case in cases}
        for number in range(rounds):
            speeds.append(dict.fromkeys(cases, 0.0))
            for name in self._order(cases):
                case = self._cases[name]
                await _tell(case.client, case.policy)
                window = await run(case, number)
                speeds[-1][name] = window.tokens_per_s
                totals[name].add(window)
        drafted = {case: window.mean_draft_len for case, window in totals.items()}
        return Level(level, speeds, drafted)

    def _jobs(self, prompts: Sequence[Sequence[int]], streams: int, number: int) -> list[Job]:
        """The same for all cases of round `number`."""
        plan = self._plan
        count = max(plan.least_jobs, plan.jobs_a_stream * streams)
        return [
            (prompts[(number * count + i) % len(prompts)], plan.tokens[i % len(plan.tokens)])
            for i in range(count)
        ]

    def _order(self, cases: Sequence[str]) -> list[str]:
        """Another one each time: each case comes first, and after each other, in turn."""
        self._turns += 1
        shift = self._turns % len(cases)
        order = [*cases[shift:], *cases[:shift]]
        return order if self._turns // len(cases) % 2 else order[::-1]

    async def _service(self, *settings: str) -> GatewayClient:
        if "--drafter" not in settings:
            settings = (*settings, "--drafter-dir", str(self._options.drafter_dir))
        rows = ("--max-batch-rows", str(_ROWS))
        address = self._services.enter_context(
            serving(self._options.model_dir, (*settings, *rows), cache=self._cache)
        )
        return await self._clients.enter_async_context(GatewayClient(address))

    def _falsified(self, name: str, factor: float) -> Path:
        """The table that the first service measured, made wrong for steps with drafts."""
        (measured,) = self._cache.rglob("*.json")
        table = CostTable.load(measured)
        wrong = {
            draft_len: curve.scaled(factor) if draft_len else curve
            for draft_len, curve in table.curves.items()
        }
        costs = self._folder / f"{name}.json"
        replace(table, curves=wrong).save(costs)
        return costs


async def _tell(client: GatewayClient, policy: gate_pb2.GatePolicy | None) -> None:
    if policy is not None:
        await client.set_gate_policy(policy, save=False, timeout_s=60.0)


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    most, found = float("inf"), []
    for level in report.levels:
        for gate in (case for case in GATES if case in level.cases):
            name = level.name if gate == "auto" else f"{level.name}, drafts {gate}"
            to_best, to_plain = level.ratio(gate, level.best_fixed), level.ratio(gate, "K=0")
            found.append(Goal(f"{name}: gate / best fixed", to_best, 0.95, most))
            if level.name == f"{_ROWS} streams":
                found.append(Goal(f"{name}: gate / K = 0", to_plain, 0.97, most))
            if level.name == CHAT:
                found.append(Goal(f"{name}: gate / K = 0", to_plain, 1.3, most))
        if _TAXED in level.cases:
            tax = 1 - level.ratio(_TAXED, _UNTAXED)
            found.append(Goal(f"{level.name}: K = 0 tax", tax, -most, 0.03))
    if report.ceiling is not None:
        found.append(
            Goal(
                "p99 gap under a ceiling, ms",
                report.ceiling.p99_ms["auto"],
                0.0,
                report.ceiling.max_step_ms,
            )
        )
    return found


def _print(report: Report) -> None:
    machine = report.machine
    print(f"{report.model} in bf16, greedy, on {machine.cpu}, {machine.threads} threads")
    print("tokens/s of all streams, and the gate over each fixed draft length: medians of rounds\n")
    shown = ("auto", *FIXED, *_FALSE, _TAXED, _UNTAXED)
    print(f"{'':<22}" + "".join(f"{case:>11}" for case in shown) + "   /K=0  /best  drafted")
    for level in report.levels:
        speeds = "".join(
            f"{level.tokens_per_s(case):11.1f}" if case in level.cases else f"{'':>11}"
            for case in shown
        )
        print(
            f"{level.name:<22}{speeds}{level.ratio('auto', 'K=0'):7.2f}"
            f"{level.ratio('auto', level.best_fixed):7.2f}{level.draft_lens['auto']:9.2f}"
        )
    print()
    if report.ceiling is not None:
        gaps = ", ".join(
            f"{case} {gap_ms:.0f} ms" for case, gap_ms in report.ceiling.p99_ms.items()
        )
        print(
            f"p99 gap of {report.ceiling.streams} streams under a ceiling of "
            f"{report.ceiling.max_step_ms:.0f} ms: {gaps}\n"
        )


if __name__ == "__main__":
    raise SystemExit(main())
