"""The gate and other laws of the draft length, over loads that rise and fall.

Replays ten phases of 1 to 240 rows with a published grid of step times (Llama-3.1-8B with EAGLE on
an H100) and with one that has a cliff at 256 tokens, in four cases: the profile is right;
verification is really 1.6 times as dear above 128 tokens; acceptance halves half-way; contexts are
long. Requests differ in how much of a draft they accept, and every seventh step has a prompt chunk.
Then, at constant load: whether prompt chunks alone make the gate switch, what few rows with short
answers do, and from how many rows on drafts by row gain.

Pure arithmetic: it measures laws, not this machine.

    python benchmarks/gate_replay.py [--quick] [--check] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from common import benchmark_parser, conclude
from draftgate.speculation import Gate, GateSettings, Load
from draftgate.speculation.laws import AutoLaw, Choice, Law
from draftgate.speculation.replay import Replay, replay
from draftgate.speculation.world import Phase, Requests, World
from gate_replay_report import Case, Chunks, ComeAndGo, Gain, Plan, Report, Result, goals, show
from gate_replay_worlds import REQUESTS, ROWS, laws, steady_world, world

__all__ = ["QUICK", "main", "measure"]

QUICK = Plan(
    seeds=1,
    plain_steps=450,
    grids=("published",),
    cases=("right", "dearer"),
    steady_rows=(24, 240),
    steady_steps=400,
)

_CHUNKS = ((7, 128, 1), (3, 256, 1), (100, 512, 8))
"""Every so many steps, of so many tokens, so many steps in a row."""

_SHORT_TOKENS = 24
_PAUSE_S = 0.1


def main(argv: Sequence[str] | None = None, plan: Plan | None = None) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Compare the gate with other laws of the draft length over given loads.",
        quick="one grid, two cases, one seed, shorter",
    )
    options = parser.parse_args(argv)
    report = measure(plan or (QUICK if options.quick else Plan()))
    return conclude(options, report, goals(report), lambda: show(report))


def measure(plan: Plan) -> Report:
    """Replay all that the plan says."""
    cases = []
    for grid in plan.grids:
        for case in plan.cases:
            true = world(grid, case, plan.plain_steps)
            cases.append(Case(grid, case, _results(true, plan, laws(true))))
    steady = [(grid, rows) for grid in plan.grids for rows in plan.steady_rows]
    return Report(
        plan,
        tuple(cases),
        tuple(_chunks(plan, grid, rows) for grid, rows in steady),
        tuple(_come_and_go(plan, grid) for grid in plan.grids),
        tuple(_gain(plan, grid, rows) for grid, rows in steady),
    )


def _results(true: World, plan: Plan, makers: Mapping[str, Callable[[], Law]]) -> dict[str, Result]:
    """Every law's, with the gate first: its steps say from when on a phase counts."""
    from_s: list[list[float]] = []
    found = {}
    for name, make in makers.items():
        runs = [replay(make(), true, seed=seed) for seed in range(plan.seeds)]
        if not from_s:
            assert name == "auto"
            from_s = [
                [phase.ends_s[min(plan.settle_steps, phase.steps - 1)] for phase in run.phases]
                for run in runs
            ]
        found[name] = _result(runs, from_s)
    return found


def _result(runs: Sequence[Replay], from_s: Sequence[Sequence[float]]) -> Result:
    phases = []
    for number in range(len(ROWS)):
        parts = [
            run.phases[number].since(times_s[number])
            for run, times_s in zip(runs, from_s, strict=True)
        ]
        phases.append(sum(tokens for tokens, _ in parts) / sum(seconds for _, seconds in parts))
    return Result(
        tokens_per_s=sum(run.tokens_per_s for run in runs) / len(runs),
        steps=sum(run.steps for run in runs),
        switches=sum(run.switches for run in runs),
        phases=tuple(phases),
    )


class _Watched(AutoLaw):
    """The gate, with how often it had switched at each step, probes apart."""

    def __init__(self, true: World, settings: GateSettings | None = None) -> None:
        super().__init__(Gate(true.costs.draft_lens, true.costs, settings=settings))
        self._switches: list[int] = []

    def decide(self, load: Load) -> Choice:
        choice = super().decide(load)
        self._switches.append(self.gate.switches)
        return choice

    def switches_since(self, step: int) -> int:
        return self._switches[-1] - self._switches[min(step, len(self._switches) - 1)]


def _chunks(plan: Plan, grid: str, rows: int) -> Chunks:
    """Switches of gates that see the same load with and without prompt chunks, all requests alike:
    nothing else changes. They have settled once their mean over chunks has."""
    requests = Requests.alike(REQUESTS.survival(REQUESTS.places), REQUESTS.output_tokens)
    settle_steps = 2 * GateSettings().prefill_mean_steps

    def switches(*chunks: int) -> int:
        phase = Phase(rows, 1.0, 0, *chunks)
        true = steady_world(grid, phase, settle_steps + plan.steady_steps, requests)
        found = 0
        for seed in range(plan.seeds):
            law = _Watched(true)
            replay(law, true, seed=seed)
            found += law.switches_since(settle_steps)
        return found

    return Chunks(grid, rows, switches(), tuple(switches(*chunks) for chunks in _CHUNKS))


def _come_and_go(plan: Plan, grid: str) -> ComeAndGo:
    """Four rows at most, with answers of a line and pauses between them."""
    phase = Phase(4, 1.0, prefill_every=11, pause_s=_PAUSE_S)
    requests = replace(REQUESTS, output_tokens=_SHORT_TOKENS)
    true = steady_world(grid, phase, plan.settle_steps + 2 * plan.steady_steps, requests)
    runs = []
    for seed in range(plan.seeds):
        law = _Watched(true)
        runs.append((replay(law, true, seed=seed).steps, law.switches_since(0)))
    return ComeAndGo(grid, sum(steps for steps, _ in runs), sum(switches for _, switches in runs))


def _gain(plan: Plan, grid: str, rows: int) -> Gain:
    """What drafts by row gain over as many for all rows, once settled."""
    phase = Phase(rows, 1.0, prefill_every=7)
    true = steady_world(grid, phase, plan.settle_steps + plan.steady_steps, REQUESTS)
    speeds = []
    for by_row in (True, False):
        tokens = seconds = 0.0
        for seed in range(plan.seeds):
            law = _Watched(true, GateSettings(by_row=by_row))
            [only] = replay(law, true, seed=seed).phases
            more, took_s = only.since(only.ends_s[plan.settle_steps])
            tokens, seconds = tokens + more, seconds + took_s
        speeds.append(tokens / seconds)
    return Gain(grid, rows, speeds[0] / speeds[1])


if __name__ == "__main__":
    raise SystemExit(main())
