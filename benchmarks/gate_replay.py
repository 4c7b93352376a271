"""The gate and other laws of the draft length, over loads that rise and fall.

Replays ten phases of 1 to 240 rows with a published grid of step times (Llama-3.1-8B with EAGLE on
an H100) and with one that has a cliff at 256 tokens, in four cases: the profile is right;
verification is really 1.6 times as dear above 128 tokens; acceptance halves half-way; contexts are
long. Pure arithmetic: it measures laws, not this machine.

    python benchmarks/gate_replay.py [--quick] [--check] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from common import Goal, benchmark_parser, conclude
from draftgate.speculation import CostCurve, CostTable, Gate
from draftgate.speculation.laws import (
    AutoLaw,
    EmaLaw,
    FixedLaw,
    GoodputLaw,
    Law,
    TableLaw,
)
from draftgate.speculation.replay import Phase, Replay, Requests, World, replay

__all__ = ["CASES", "GRIDS", "Plan", "Report", "goals", "main", "measure"]

_BATCHES = (1, 4, 16, 64, 256)
_PUBLISHED_MS = {
    0: (6.5206, 6.6015, 6.8988, 7.7741, 14.4914),
    1: (7.3676, 7.4728, 7.8523, 9.6564, 27.1381),
    3: (8.8407, 8.9812, 9.5183, 13.4979, 41.8484),
    5: (10.3265, 10.4003, 11.1964, 16.8312, 57.4042),
}
"""By draft length, for the batch sizes above (vLLM's pull request 32374)."""
_SURVIVAL = (0.681, 0.391, 0.204, 0.101, 0.051)
"""How likely each draft is to stand there (MT-Bench)."""
_KV_US = 0.039
"""Microseconds a KV token on an H100 with an 8B model (SpecDecode-Bench's fit)."""

ROWS = (2, 8, 24, 60, 120, 240, 120, 60, 24, 1)
_LONG_CONTEXT = 6000
_SETTLE_STEPS = 200
"""After so many steps of a phase the gate has to have found its way."""


def _published() -> CostTable:
    return CostTable(
        {
            k: CostCurve(tuple(rows * (k + 1) for rows in _BATCHES), times)
            for k, times in _PUBLISHED_MS.items()
        }
    )


def _with_cliff() -> CostTable:
    tokens = (1, 8, 32, 64, 128, 256, 257, 512, 2048)

    def step_ms(draft_len: int, count: int) -> float:
        return 8 + 0.012 * count + 0.9 * draft_len + (14 if count > 256 else 0)

    return CostTable(
        {k: CostCurve(tokens, tuple(step_ms(k, t) for t in tokens)) for k in (0, 1, 2, 3, 4, 6)}
    )


GRIDS: Mapping[str, Callable[[], CostTable]] = {"published": _published, "cliff": _with_cliff}
CASES = ("right", "dearer", "halved", "long")


@dataclass(frozen=True)
class Plan:
    """How much to replay."""

    seeds: int = 3
    plain_steps: int = 700
    """How long a phase is, in steps without drafts."""
    grids: tuple[str, ...] = tuple(GRIDS)
    cases: tuple[str, ...] = CASES


QUICK = Plan(seeds=1, plain_steps=450, grids=("published",), cases=("right", "dearer"))


@dataclass(frozen=True)
class Result:
    """A law in one case of one grid, over all seeds."""

    law: str
    tokens_per_s: float
    steps: int
    switches: int
    prefill_switches: int
    phases: tuple[float, ...]
    """tokens/s of each phase, for the gate without its first steps."""


@dataclass(frozen=True)
class Case:
    """All laws in one case of one grid."""

    grid: str
    case: str
    results: Mapping[str, Result] = field(default_factory=dict)

    @property
    def worst_to_plain(self) -> float:
        """The gate over no drafts, in the phase where that is least."""
        return self._worst(["fixed:0"])

    @property
    def worst_to_fixed(self) -> float:
        """The gate over the best fixed draft length of each phase, where that is least."""
        return self._worst([name for name in self.results if name.startswith("fixed:")])

    @property
    def to_best_other(self) -> float:
        """All tokens over those of the best other law."""
        others = [r.tokens_per_s for name, r in self.results.items() if name != "auto"]
        return self.results["auto"].tokens_per_s / max(others)

    def _worst(self, names: Sequence[str]) -> float:
        best = [max(self.results[n].phases[i] for n in names) for i in range(len(ROWS))]
        return min(a / b for a, b in zip(self.results["auto"].phases, best, strict=True))


@dataclass(frozen=True)
class Report:
    """Everything that one run found."""

    plan: Plan
    cases: tuple[Case, ...]


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Compare the gate with other laws of the draft length over given loads.",
        quick="one grid, two cases, one seed",
    )
    options = parser.parse_args(argv)
    report = measure(plan or (QUICK if options.quick else Plan()))
    return conclude(options, report, goals(report), lambda: _print(report))


def measure(plan: Plan) -> Report:
    """Replay all that the plan says."""
    cases = [_case(plan, grid, case) for grid in plan.grids for case in plan.cases]
    return Report(plan, tuple(cases))


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    most, found = float("inf"), []
    for each in report.cases:
        name = f"{each.grid}, {each.case}"
        least = 0.98 if each.case == "right" else 0.95
        gate = each.results["auto"]
        found += [
            Goal(f"{name}: worst phase / no drafts", each.worst_to_plain, 0.98, most),
            Goal(f"{name}: worst phase / best fixed", each.worst_to_fixed, least, most),
            Goal(f"{name}: tokens / best other law", each.to_best_other, 0.99, most),
            Goal(f"{name}: steps a switch", gate.steps / max(gate.switches, 1), 50, most),
            Goal(f"{name}: switches by prompt chunks", gate.prefill_switches, 0, 0),
        ]
    for grid in {each.grid for each in report.cases}:
        ahead = [each.to_best_other >= 1 for each in report.cases if each.grid == grid]
        if len(ahead) == len(CASES):
            found.append(Goal(f"{grid}: cases ahead of every other law", sum(ahead), 3, most))
    return found


def _case(plan: Plan, grid: str, case: str) -> Case:
    costs = GRIDS[grid]()
    rates = [_SURVIVAL[0]]
    rates += [b / a for a, b in zip(_SURVIVAL, _SURVIVAL[1:], strict=False)]
    requests = Requests([(1.0, rates)])
    context = 0
    if case == "long":
        context = _LONG_CONTEXT
        curves = {k: replace(curve, kv_us=_KV_US) for k, curve in costs.curves.items()}
        costs = CostTable(curves)
    phases = [
        Phase(
            rows,
            plan.plain_steps * costs.step_ms(0, rows, rows * context) / 1e3,
            context_tokens=context,
            prefill_every=7,
        )
        for rows in ROWS
    ]
    world = World(costs, requests, phases)
    if case == "dearer":
        world = replace(world, cost_factor=lambda tokens, _: 1.6 if tokens > 128 else 1.0)
    elif case == "halved":
        world = replace(world, requests_later=requests.halved())
    lens = costs.draft_lens
    survival = requests.survival(lens[-1])
    makers: dict[str, Callable[[], Law]] = {
        "auto": lambda: AutoLaw(Gate(lens, costs)),
        **{f"fixed:{k}": (lambda k=k: FixedLaw(k)) for k in lens},  # type: ignore[misc]
        "table": lambda: TableLaw.tuned(costs, survival, lens, max(ROWS)),
        "ema": lambda: EmaLaw(lens),
        "goodput": lambda: GoodputLaw(costs, lens),
    }
    results = {
        name: _result(name, [replay(make(), world, seed=seed) for seed in range(plan.seeds)])
        for name, make in makers.items()
    }
    return Case(grid, case, results)


def _result(name: str, runs: Sequence[Replay]) -> Result:
    phases = []
    for number in range(len(ROWS)):
        parts = [run.phases[number] for run in runs]
        if name == "auto":
            tokens = sum(part.settled_tokens for part in parts)
            phases.append(tokens / sum(part.settled_seconds for part in parts))
        else:
            phases.append(sum(p.tokens for p in parts) / sum(p.seconds for p in parts))
    return Result(
        law=name,
        tokens_per_s=sum(run.tokens_per_s for run in runs) / len(runs),
        steps=sum(run.steps for run in runs),
        switches=sum(run.switches for run in runs),
        prefill_switches=sum(run.prefill_switches for run in runs),
        phases=tuple(phases),
    )


def _print(report: Report) -> None:
    for each in report.cases:
        print(f"{each.grid}, {each.case}: tokens/s, steps a switch, by phase")
        for name, result in each.results.items():
            phases = " ".join(f"{speed:7.0f}" for speed in result.phases)
            every = result.steps / result.switches if result.switches else float("inf")
            print(f"  {name:<8}{result.tokens_per_s:8.0f}{every:8.0f}  {phases}")
        print(
            f"  worst phase / no drafts {each.worst_to_plain:.3f}, / best fixed "
            f"{each.worst_to_fixed:.3f}; all tokens / best other law {each.to_best_other:.3f}\n"
        )


if __name__ == "__main__":
    raise SystemExit(main())
