"""The load gate on the real engine, through Triton and the gateway, against fixed draft lengths.

Streams in a closed loop, 1 to 32 at a time, on prompts never trained on, with the gate and with
fixed draft lengths in turn, many times over; a load that rises and falls; what the gate costs where
it never drafts; a gate whose cost table is wrong; and the gap between chunks under a ceiling.

    python benchmarks/gate_live.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                   [--drafter-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import Goal, Machine, benchmark_parser, conclude
from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate.cli.client import GatewayClient
from draftgate.speculation import CostTable
from gate_load import Window, closed_loop
from held_out import add_folders, held_out_prompts
from served import serving

__all__ = ["CASES", "Level", "Plan", "Report", "goals", "main", "measure"]

_MODES = {
    "auto": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO),
    "K=0": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF),
    "K=2": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=2),
    "K=4": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=4),
}
CASES = tuple(_MODES)

_NEVER = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO, max_draft_len=0)
"""A gate that decides, and can decide on nothing but no drafts."""

_FALSE = {"drafts too cheap": 1 / 1.6, "drafts too dear": 1.6}
"""What the times of steps with drafts are multiplied with in a table that is wrong."""

_ROWS = 32


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Streams at a time."""
    rounds: int = 5
    """Over all cases, each time in another order."""
    settle_s: float = 1.5
    window_s: float = 5.0
    max_tokens: int = 96
    """Longest answer."""
    ramp: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1)
    """Streams, one level after the other; none: no ramp."""
    ramp_rounds: int = 3
    ramp_s: float = 3.0
    """Of each level."""
    false_levels: tuple[int, ...] = (1, 8, 32)
    """Levels at which a gate with a wrong table is measured."""
    false_steps: int = 300
    """After so many steps it has to have found out."""
    tax_levels: tuple[int, ...] = (1, 32)
    ceiling_streams: int = 8
    """Streams with a ceiling on the gap; 0: not measured."""
    ceiling_s: float = 20.0


QUICK = Plan(
    levels=(1, 16),
    rounds=1,
    settle_s=1.0,
    window_s=2.0,
    ramp=(),
    false_levels=(),
    tax_levels=(),
    ceiling_streams=0,
)


@dataclass(frozen=True)
class Level:
    """So many streams, in every case."""

    name: str
    tokens_per_s: Mapping[str, float]
    """The median of the rounds, by case."""
    ratios: Mapping[str, float]
    """By case, the median of the rounds' tokens/s of the gate over that case's."""
    mean_draft_len: float
    """What the gate drafted a chunk."""

    @property
    def to_best_fixed(self) -> float:
        """The gate over the fixed draft length that was the best here."""
        fixed = {name: speed for name, speed in self.tokens_per_s.items() if name.startswith("K=")}
        return self.ratios[max(fixed, key=lambda name: fixed[name])]


@dataclass(frozen=True)
class Ceiling:
    """Gaps between the chunks of a stream under a ceiling on steps."""

    streams: int
    max_step_ms: float
    p99_ms: Mapping[str, float]
    """By case: the gate with the ceiling, and without it K = 4 and K = 0."""


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    plan: Plan
    levels: tuple[Level, ...]
    falsified: tuple[Level, ...]
    tax: Mapping[str, float]
    """By streams: how much slower a gate that never drafts is than an engine without a drafter."""
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
        runs = _Runs(plan, options, services)
        async with AsyncExitStack() as stack:
            gate = await runs.client(stack, "--gate", "auto")
            cases = {name: (gate, policy) for name, policy in _MODES.items()}
            levels = [await runs.level(f"{n} streams", cases, mixed, n) for n in plan.levels]
            if 1 in plan.levels:
                levels.append(await runs.level("1 stream, chat", cases, chat, 1))
            if plan.ramp:
                levels.append(await runs.ramp(cases, mixed))
            ceiling = await runs.ceiling(gate, mixed) if plan.ceiling_streams else None
            falsified = []
            for name, factor in _FALSE.items() if plan.false_levels else ():
                wrong = await runs.falsified(stack, factor)
                told = {**cases, "auto": (wrong, None)}
                falsified += [
                    await runs.level(f"{n} streams, {name}", told, mixed, n, plan.false_steps)
                    for n in plan.false_levels
                ]
            tax = {}
            if plan.tax_levels:
                plain = await runs.client(stack, "--drafter", "none")
                pair = {"auto": (gate, _NEVER), "plain": (plain, None)}
                for n in plan.tax_levels:
                    level = await runs.level(f"{n}", pair, mixed, n)
                    tax[level.name] = 1 / level.ratios["plain"] - 1
    return Report(
        machine=Machine.this(),
        model=options.model_dir.name,
        plan=plan,
        levels=tuple(levels),
        falsified=tuple(falsified),
        tax=tax,
        ceiling=ceiling,
    )


_Case = tuple[GatewayClient, gate_pb2.GatePolicy | None]
"""Which service, and what its gate is told."""


class _Runs:
    """Services, and what is measured on them."""

    def __init__(self, plan: Plan, options: argparse.Namespace, services: ExitStack) -> None:
        self._plan = plan
        self._options = options
        self._services = services
        self._folder = Path(services.enter_context(tempfile.TemporaryDirectory()))
        self._cache = self._folder / "cache"
        self._rounds = 0

    async def client(self, stack: AsyncExitStack, *settings: str) -> GatewayClient:
        """Of a service of its own."""
        if "--drafter" not in settings:
            settings = (*settings, "--drafter-dir", str(self._options.drafter_dir))
        rows = ("--max-batch-rows", str(_ROWS))
        address = self._services.enter_context(
            serving(self._options.model_dir, (*settings, *rows), cache=self._cache)
        )
        return await stack.enter_async_context(GatewayClient(address))

    async def falsified(self, stack: AsyncExitStack, factor: float) -> GatewayClient:
        """A service whose gate starts from the table that the first one measured, made wrong by
        this factor for steps with drafts."""
        (measured,) = self._cache.rglob("*.json")
        table = CostTable.load(measured)
        wrong = {
            draft_len: curve.scaled(factor) if draft_len else curve
            for draft_len, curve in table.curves.items()
        }
        costs = self._folder / f"wrong by {factor}.json"
        replace(table, curves=wrong).save(costs)
        return await self.client(stack, "--gate", "auto", "--costs", str(costs))

    async def level(
        self,
        name: str,
        cases: Mapping[str, _Case],
        prompts: Sequence[Sequence[int]],
        streams: int,
        settle_steps: int = 0,
    ) -> Level:
        """So many streams in every case, in interleaved rounds. settle_steps: before the first
        window of the gate's."""
        rounds: list[dict[str, Window]] = []
        for number in range(self._plan.rounds):
            rounds.append({})
            for case in self._order(cases):
                client, policy = cases[case]
                rounds[-1][case] = await closed_loop(
                    client,
                    policy,
                    _from(prompts, 7 * number),
                    streams,
                    settle_s=self._plan.settle_s,
                    window_s=self._plan.window_s,
                    max_tokens=self._plan.max_tokens,
                    settle_steps=settle_steps if case == "auto" and number == 0 else 0,
                )
        return _level(name, rounds)

    async def ramp(self, cases: Mapping[str, _Case], prompts: Sequence[Sequence[int]]) -> Level:
        """A load that rises and falls, without a pause between the levels."""
        rounds: list[dict[str, Window]] = []
        for number in range(self._plan.ramp_rounds):
            rounds.append({})
            for case in self._order(cases):
                client, policy = cases[case]
                whole = Window(max(self._plan.ramp), 0.0)
                for place, streams in enumerate(self._plan.ramp):
                    part = await closed_loop(
                        client,
                        policy if place == 0 else None,
                        _from(prompts, 7 * number + place),
                        streams,
                        settle_s=0.0,
                        window_s=self._plan.ramp_s,
                        max_tokens=self._plan.max_tokens,
                    )
                    whole.add(part)
                rounds[-1][case] = whole
        return _level(f"ramp 1 to {max(self._plan.ramp)} to 1", rounds)

    async def ceiling(self, gate: GatewayClient, prompts: Sequence[Sequence[int]]) -> Ceiling:
        """Gaps with the gate under a ceiling half-way between those of K = 0 and of K = 4."""
        p99_ms = {}
        limit_ms = 0.0
        for case in ("K=0", "K=4", "ceiling"):
            policy = _MODES.get(case)
            if policy is None:
                limit_ms = (p99_ms["K=0"] + p99_ms["K=4"]) / 2
                policy = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO, max_step_ms=limit_ms)
            window = await closed_loop(
                gate,
                policy,
                prompts,
                self._plan.ceiling_streams,
                settle_s=2 * self._plan.settle_s,
                window_s=self._plan.ceiling_s,
                max_tokens=self._plan.max_tokens,
            )
            p99_ms[case] = float(np.percentile(window.gaps_ms, 99))
        return Ceiling(self._plan.ceiling_streams, limit_ms, p99_ms)

    def _order(self, cases: Mapping[str, _Case]) -> list[str]:
        """Another order in every round: each case comes first, and after each other, in turn."""
        self._rounds += 1
        names = list(cases)
        shift = self._rounds % len(names)
        order = names[shift:] + names[:shift]
        return order if self._rounds // len(names) % 2 else order[::-1]


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    most, found = float("inf"), []
    for level in (*report.levels, *report.falsified):
        found.append(Goal(f"{level.name}: gate / best fixed", level.to_best_fixed, 0.95, most))
        if level.name.startswith(f"{_ROWS} streams"):
            found.append(Goal(f"{level.name}: gate / K = 0", level.ratios["K=0"], 0.97, most))
        if level.name == "1 stream, chat":
            found.append(Goal(f"{level.name}: gate / K = 0", level.ratios["K=0"], 1.3, most))
    for streams, share in report.tax.items():
        found.append(Goal(f"K = 0 tax, {streams} streams", share, -most, 0.03))
    if report.ceiling is not None:
        found.append(
            Goal(
                "p99 gap under a ceiling, ms",
                report.ceiling.p99_ms["ceiling"],
                0.0,
                report.ceiling.max_step_ms,
            )
        )
    return found


def _level(name: str, rounds: Sequence[Mapping[str, Window]]) -> Level:
    cases = rounds[0]
    return Level(
        name=name,
        tokens_per_s={
            case: statistics.median(each[case].tokens_per_s for each in rounds) for case in cases
        },
        ratios={
            case: statistics.median(
                each["auto"].tokens_per_s / each[case].tokens_per_s for each in rounds
            )
            for case in cases
            if case != "auto"
        },
        mean_draft_len=statistics.mean(each["auto"].mean_draft_len for each in rounds),
    )


def _from(prompts: Sequence[Sequence[int]], start: int) -> list[Sequence[int]]:
    start %= len(prompts)
    return [*prompts[start:], *prompts[:start]]


def _print(report: Report) -> None:
    machine = report.machine
    print(f"{report.model} in bf16, greedy, on {machine.cpu}, {machine.threads} threads")
    print("tokens/s of all streams; the gate over each fixed draft length, medians of rounds\n")
    print(f"{'':<34}" + "".join(f"{case:>8}" for case in CASES) + "   /K=0  /best  drafted")
    for level in (*report.levels, *report.falsified):
        speeds = "".join(f"{level.tokens_per_s[case]:8.1f}" for case in CASES)
        print(
            f"{level.name:<34}{speeds}{level.ratios['K=0']:7.2f}{level.to_best_fixed:7.2f}"
            f"{level.mean_draft_len:9.2f}"
        )
    print()
    for streams, share in report.tax.items():
        print(
            f"gate that never drafts, {streams} streams: {100 * share:.1f} % slower than no drafter"
        )
    if report.ceiling is not None:
        gaps = ", ".join(
            f"{case} {gap_ms:.0f} ms" for case, gap_ms in report.ceiling.p99_ms.items()
        )
        print(
            f"p99 gap of {report.ceiling.streams} streams under a ceiling of "
            f"{report.ceiling.max_step_ms:.0f} ms: {gaps}"
        )
    print()


if __name__ == "__main__":
    raise SystemExit(main())
