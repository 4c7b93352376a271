"""The load gate on the real engine, through Triton and the gateway, against fixed draft lengths.

Streams in a closed loop, 1 to 32 at a time, on prompts never trained on. While they run, the gate
is left alone and told fixed draft lengths in turn, a moment each, many times over; so all cases
meet the same requests at the same time of a machine whose speed changes. With one stream they
write the same answer in turn, for texts differ more than cases do. The same with a load that rises
and falls, and with gates whose cost table is wrong: those have services of their own and learn from
nothing but their own steps. Then the gap between chunks under a ceiling, and what the gate costs
where it never drafts.

    python benchmarks/gate_live.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                   [--drafter-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from common import Goal, Machine, benchmark_parser, conclude
from draftgate._pb.draftgate.v1 import gate_pb2
from draftgate.cli.client import GatewayClient
from draftgate.speculation import CostTable
from gate_load import Job, Part, alternate, answer_in_turn, apart, load, run_steps
from gate_tax import Tax, measure_tax
from held_out import add_folders, held_out_prompts
from served import serving

__all__ = ["CASES", "CHAT", "Ceiling", "Level", "Plan", "Report", "goals", "main", "measure"]

CASES: Mapping[str, gate_pb2.GatePolicy] = {
    "gate": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO),
    "K=0": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_OFF),
    "K=2": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=2),
    "K=4": gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_FIXED, draft_len=4),
}

_FALSE = {"too cheap": 1 / 1.6, "too dear": 1.6}
"""What a wrong table has the times of steps with drafts multiplied with."""

_ROWS = 32
CHAT = "1 stream, chat"


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    levels: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Streams at a time."""
    rounds: int = 40
    """Over all cases, each time in another order, over the root of the number of streams: with more
    of them one says more."""
    least_rounds: int = 12
    answers: int = 24
    """Rounds with one stream, of an answer each."""
    segment_s: float = 1.0
    """How long a case lasts, times the root of the number of streams: with more, steps take longer.
    With one stream it is an answer."""
    settle_steps: int = 20
    tokens: tuple[int, ...] = (64, 32, 96, 48, 80)
    """Longest answers, in turn: rows end one by one."""
    ramp: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 16, 8, 4, 2, 1)
    """Streams, one level after the other; none: no ramp."""
    ramp_rounds: int = 2
    false_levels: tuple[int, ...] = (1, 8, 32)
    """Levels at which gates with a wrong table are measured; of one stream, on chat."""
    false_steps: int = 300
    """After so many steps of a level they have to have found out."""
    false_rounds: int = 10
    tax_rows: tuple[int, ...] = (1, 32)
    tax_steps: int = 60
    ceiling_streams: int = 8
    """Streams with a ceiling on the gap; 0: not measured."""
    ceiling_s: float = 15.0

    def rounds_of(self, streams: int) -> int:
        """How many with so many streams."""
        if streams == 1:
            return self.answers
        return max(round(self.rounds / streams**0.5), min(self.rounds, self.least_rounds))


QUICK = Plan(
    levels=(1, 8),
    rounds=3,
    answers=3,
    segment_s=0.6,
    settle_steps=5,
    ramp=(),
    false_levels=(),
    tax_rows=(1,),
    tax_steps=20,
    ceiling_streams=0,
)


@dataclass(frozen=True)
class Level:
    """So many streams."""

    name: str
    rounds: Sequence[Mapping[str, float]]
    """Tokens/s of each case, by round."""
    draft_lens: Mapping[str, float]
    """Drafted tokens of a row in a step, by case."""

    @classmethod
    def of(cls, name: str, rounds: Sequence[Mapping[str, Part]]) -> Level:
        """Rounds in which a case came to nothing, between two long steps, are left out."""
        whole = [each for each in rounds if all(each[case].seconds for case in CASES)]
        totals = {case: Part() for case in CASES}
        for each in whole:
            for case, total in totals.items():
                total.add(each[case])
        return cls(
            name,
            [{case: each[case].tokens_per_s for case in CASES} for each in whole],
            {case: total.mean_draft_len for case, total in totals.items()},
        )

    @property
    def best_fixed(self) -> str:
        """The fixed draft length with the most tokens/s."""
        return max((case for case in CASES if case != "gate"), key=self.tokens_per_s)

    def tokens_per_s(self, case: str) -> float:
        """The median of the rounds."""
        return statistics.median(each[case] for each in self.rounds)

    def gate_over(self, case: str) -> float:
        """The gate's tokens/s over a case's: the median of the rounds' ratios, since the machine
        may be faster in one round than in the next."""
        return statistics.median(each["gate"] / each[case] for each in self.rounds)


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
    taxes: tuple[Tax, ...]


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure the load gate on the real engine, through Triton and the gateway.",
        quick="two levels, few rounds",
    )
    add_folders(parser)
    options = parser.parse_args(argv)
    report = measure(options, plan or (QUICK if options.quick else Plan()))
    return conclude(options, report, goals(report), lambda: _print(report))


def measure(options: argparse.Namespace, plan: Plan) -> Report:
    """Measure all that the plan says."""
    # Before there are services, and on this thread alone.
    taxes = [
        measure_tax(options.model_dir, options.drafter_dir, rows, plan.tax_steps)
        for rows in plan.tax_rows
    ]
    levels, ceiling = asyncio.run(_measure_served(options, plan))
    return Report(
        machine=Machine.this(),
        model=options.model_dir.name,
        plan=plan,
        levels=tuple(levels),
        ceiling=ceiling,
        taxes=tuple(taxes),
    )


async def _measure_served(
    options: argparse.Namespace, plan: Plan
) -> tuple[list[Level], Ceiling | None]:
    tasks = held_out_prompts(options.model_dir)
    mixed = [ids for _, ids in tasks]
    chat = [ids for task, ids in tasks if task == "chat"]
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as clients:
            runs = _Runs(plan, options, Path(folder), clients)
            gate = await runs.service()
            levels = [await runs.level(f"{n} streams", gate, mixed, n) for n in plan.levels]
            if 1 in plan.levels:
                levels.append(await runs.level(CHAT, gate, chat, 1))
            if plan.ramp:
                levels.append(await runs.ramp(gate, mixed))
            ceiling = await runs.ceiling(gate, mixed) if plan.ceiling_streams else None
            for name, factor in _FALSE.items() if plan.false_levels else ():
                costs = runs.falsified(name, factor)
                async with AsyncExitStack() as more:
                    false = await replace(runs, clients=more).service("--costs", str(costs))
                    for n in plan.false_levels:
                        level, prompts = (CHAT, chat) if n == 1 else (f"{n} streams", mixed)
                        told = f"{level}, drafts {name}"
                        levels.append(await runs.false_level(told, gate, false, prompts, n))
    return levels, ceiling


@dataclass(frozen=True)
class _Runs:
    """Services, and what is measured on them."""

    plan: Plan
    options: argparse.Namespace
    folder: Path
    clients: AsyncExitStack

    async def service(self, *settings: str) -> GatewayClient:
        """Of a service of its own, until `clients` is left."""
        drafter = ("--drafter-dir", str(self.options.drafter_dir))
        rows = ("--max-batch-rows", str(_ROWS))
        address = self.clients.enter_context(
            serving(
                self.options.model_dir,
                ("--gate", "auto", *drafter, *rows, *settings),
                cache=self.folder / "cache",
            )
        )
        return await self.clients.enter_async_context(GatewayClient(address))

    async def level(
        self, name: str, client: GatewayClient, prompts: Sequence[Sequence[int]], streams: int
    ) -> Level:
        """So many streams."""
        plan = self.plan
        await client.set_gate_policy(CASES["gate"], save=False, timeout_s=60.0)
        jobs, orders = self._jobs(prompts), _orders(plan.rounds_of(streams))
        async with load(client, jobs, streams):
            await run_steps(client, plan.settle_steps)
            if streams > 1:
                segment_s = plan.segment_s * streams**0.5
                return Level.of(name, await alternate(client, CASES, orders, segment_s))
        return Level.of(name, await answer_in_turn(client, CASES, orders, jobs))

    async def false_level(
        self,
        name: str,
        client: GatewayClient,
        false: GatewayClient,
        prompts: Sequence[Sequence[int]],
        streams: int,
    ) -> Level:
        """The gate of one service beside the fixed draft lengths of another."""
        plan, jobs = self.plan, self._jobs(prompts)
        async with load(false, jobs, streams):
            await run_steps(false, plan.false_steps)
        clients = {case: false if case == "gate" else client for case in CASES}
        orders, segment_s = _orders(plan.false_rounds), plan.segment_s * streams**0.5
        return Level.of(name, await apart(clients, CASES, orders, jobs, streams, segment_s))

    async def ramp(self, client: GatewayClient, prompts: Sequence[Sequence[int]]) -> Level:
        """A load that rises and falls, without a pause between the levels."""
        plan = self.plan
        rounds = []
        for _ in range(plan.ramp_rounds):
            whole = {case: Part() for case in CASES}
            for order, streams in zip(_orders(len(plan.ramp)), plan.ramp, strict=True):
                async with load(client, self._jobs(prompts), streams):
                    [found] = await alternate(client, CASES, [order], plan.segment_s * streams**0.5)
                for case, total in whole.items():
                    total.add(found[case])
            rounds.append(whole)
        return Level.of(f"ramp 1 to {max(plan.ramp)} to 1", rounds)

    async def ceiling(self, client: GatewayClient, prompts: Sequence[Sequence[int]]) -> Ceiling:
        """Gaps with the gate under a ceiling half-way between those of K = 0 and of K = 4."""
        plan, p99_ms, limit_ms = self.plan, dict[str, float](), 0.0
        for case in ("K=0", "K=4", "gate"):
            policy = CASES[case]
            if case == "gate":
                limit_ms = (p99_ms["K=0"] + p99_ms["K=4"]) / 2
                policy = gate_pb2.GatePolicy(mode=gate_pb2.GATE_MODE_AUTO, max_step_ms=limit_ms)
            await client.set_gate_policy(policy, save=False, timeout_s=60.0)
            gaps_ms: list[float] = []
            async with load(client, self._jobs(prompts), plan.ceiling_streams, gaps_ms):
                await asyncio.sleep(plan.ceiling_s)
            p99_ms[case] = float(np.percentile(gaps_ms, 99))
        return Ceiling(plan.ceiling_streams, limit_ms, p99_ms)

    def falsified(self, name: str, factor: float) -> Path:
        """The table that the first service measured, made wrong for steps with drafts."""
        (measured,) = (self.folder / "cache").rglob("*.json")
        table = CostTable.load(measured)
        wrong = {
            draft_len: curve.scaled(factor) if draft_len else curve
            for draft_len, curve in table.curves.items()
        }
        costs = self.folder / f"{name}.json"
        replace(table, curves=wrong).save(costs)
        return costs

    def _jobs(self, prompts: Sequence[Sequence[int]]) -> list[Job]:
        tokens = self.plan.tokens
        return [(ids, tokens[place % len(tokens)]) for place, ids in enumerate(prompts)]


def _orders(rounds: int) -> list[list[str]]:
    """Another order each time: each case comes first, and after each other, in turn."""
    names, orders = list(CASES), []
    for number in range(rounds):
        shift = number % len(names)
        order = [*names[shift:], *names[:shift]]
        orders.append(order if number // len(names) % 2 else order[::-1])
    return orders


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    most, found = float("inf"), []
    for level in report.levels:
        to_best, to_plain = level.gate_over(level.best_fixed), level.gate_over("K=0")
        found.append(Goal(f"{level.name}: gate / best fixed", to_best, 0.95, most))
        if level.name.startswith(f"{_ROWS} streams"):
            found.append(Goal(f"{level.name}: gate / K = 0", to_plain, 0.97, most))
        if level.name.startswith(CHAT):
            found.append(Goal(f"{level.name}: gate / K = 0", to_plain, 1.3, most))
    for tax in report.taxes:
        found.append(Goal(f"{tax.rows} rows: K = 0 tax", tax.share, -most, 0.03))
    if report.ceiling is not None:
        p99_ms, limit_ms = report.ceiling.p99_ms["gate"], report.ceiling.max_step_ms
        found.append(Goal("p99 gap under a ceiling, ms", p99_ms, 0.0, limit_ms))
    return found


def _print(report: Report) -> None:
    machine = report.machine
    print(f"{report.model} in {machine.dtype}, greedy, on {machine.cpu}, {machine.threads} threads")
    print("tokens/s of all streams, and the gate over fixed draft lengths: medians of rounds\n")
    print(f"{'':<32}" + "".join(f"{case:>8}" for case in CASES) + "   /K=0  /best  drafted")
    for level in report.levels:
        speeds = "".join(f"{level.tokens_per_s(case):8.1f}" for case in CASES)
        print(
            f"{level.name:<32}{speeds}{level.gate_over('K=0'):7.2f}"
            f"{level.gate_over(level.best_fixed):7.2f}{level.draft_lens['gate']:9.2f}"
        )
    print()
    for tax in report.taxes:
        print(
            f"{tax.rows} rows, step without a drafter {tax.plain_ms:.1f} ms, with a gate that "
            f"never drafts {tax.gate_ms:.1f} ms: {100 * tax.share:+.1f} %"
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
