"""What `gate_replay.py` found: its numbers, what they are held to, and how they are printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import Goal
from gate_replay_worlds import CASES, GRIDS, ROWS

__all__ = ["Case", "Chunks", "ComeAndGo", "Gain", "Plan", "Report", "Result", "goals", "show"]

_MOST = float("inf")


@dataclass(frozen=True)
class Plan:
    """How much to replay."""

    seeds: int = 3
    plain_steps: int = 700
    """How long a phase is, in steps without drafts."""
    settle_steps: int = 200
    """After so many steps of a phase the gate has to have found its way."""
    grids: tuple[str, ...] = tuple(GRIDS)
    cases: tuple[str, ...] = CASES
    steady_rows: tuple[int, ...] = (8, 24, 60, 120, 240)
    """Rows of the loads that stay constant ..."""
    steady_steps: int = 600
    """... and their steps after settling."""


@dataclass(frozen=True)
class Result:
    """A law in one case, over all seeds."""

    tokens_per_s: float
    steps: int
    switches: int
    """Steps with another draft length than the one before, the gate's probes among them."""
    phases: tuple[float, ...]
    """tokens/s of each phase, from when on the gate has to have settled."""


@dataclass(frozen=True)
class Case:
    """All laws in one case of one grid."""

    grid: str
    case: str
    results: Mapping[str, Result]

    @property
    def worst_to_plain(self) -> float:
        """The gate over no drafts, in the phase where that is least."""
        return self._worst(["fixed:0"])

    @property
    def worst_to_fixed(self) -> float:
        """The gate over the best fixed draft length of each phase, where that is least."""
        return self._worst([name for name in self.results if name.startswith("fixed:")])

    @property
    def best_other(self) -> str:
        """The law with the most tokens beside the gate."""
        others = [name for name in self.results if name != "auto"]
        return max(others, key=lambda name: self.results[name].tokens_per_s)

    @property
    def to_best_other(self) -> float:
        """All of the gate's tokens over those of that law."""
        other = self.results[self.best_other]
        return self.results["auto"].tokens_per_s / other.tokens_per_s

    @property
    def steps_a_switch(self) -> float:
        """Of the gate."""
        gate = self.results["auto"]
        return gate.steps / max(gate.switches, 1)

    def _worst(self, names: Sequence[str]) -> float:
        best = [max(self.results[n].phases[i] for n in names) for i in range(len(ROWS))]
        return min(a / b for a, b in zip(self.results["auto"].phases, best, strict=True))


@dataclass(frozen=True)
class Chunks:
    """What prompt chunks do to a settled gate."""

    grid: str
    rows: int
    without: int
    """Switches without any."""
    with_chunks: tuple[int, ...]
    """With each pattern of them."""


@dataclass(frozen=True)
class ComeAndGo:
    """Few rows with short answers."""

    grid: str
    steps: int
    switches: int


@dataclass(frozen=True)
class Gain:
    """What drafts by row bring."""

    grid: str
    rows: int
    ratio: float
    """Tokens/s over those where all rows draft alike."""


@dataclass(frozen=True)
class Report:
    """Everything that one run found."""

    plan: Plan
    cases: tuple[Case, ...]
    chunks: tuple[Chunks, ...]
    come_and_go: tuple[ComeAndGo, ...]
    gains: tuple[Gain, ...]

    def ahead(self) -> dict[str, float]:
        """By case, the gate's tokens over those of the best other law, over all grids; of the laws
        that all grids have."""
        found = {}
        for case in self.plan.cases:
            grids = [each.results for each in self.cases if each.case == case]
            names = set.intersection(*(set(results) for results in grids))
            total = {name: sum(results[name].tokens_per_s for results in grids) for name in names}
            gate = total.pop("auto")
            found[case] = gate / max(total.values())
        return found


def goals(report: Report) -> list[Goal]:
    """What the report is held to."""
    found = []
    for each in report.cases:
        name = f"{each.grid}, {each.case}"
        least = 0.98 if each.case == "right" else 0.95
        found += [
            Goal(f"{name}: worst phase / no drafts", each.worst_to_plain, 0.98, _MOST),
            Goal(f"{name}: worst phase / best fixed", each.worst_to_fixed, least, _MOST),
            Goal(f"{name}: tokens / best other law", each.to_best_other, 0.99, _MOST),
            Goal(f"{name}: steps a switch", each.steps_a_switch, 50, _MOST),
        ]
    if set(report.plan.cases) == set(CASES):
        ahead = sum(ratio >= 1 for ratio in report.ahead().values())
        found.append(Goal("cases ahead of all other laws, over all grids", ahead, 3, _MOST))
    for grid in report.plan.grids:
        more = [max(each.with_chunks) - each.without for each in report.chunks if each.grid == grid]
        found.append(Goal(f"{grid}: switches from prompt chunks alone", max(*more, 0), 0, 0))
    for some in report.come_and_go:
        steps = some.steps / max(some.switches, 1)
        found.append(Goal(f"{some.grid}, rows that come and go: steps a switch", steps, 50, _MOST))
    for grid in report.plan.grids:
        ratios = [each.ratio for each in report.gains if each.grid == grid]
        found.append(Goal(f"{grid}: drafts by row / alike, at worst", min(ratios), 0.99, _MOST))
        found.append(Goal(f"{grid}: drafts by row / alike, at best", max(ratios), 1.01, _MOST))
    return found


def show(report: Report) -> None:
    """Print it."""
    for each in report.cases:
        print(f"{each.grid}, {each.case}: tokens/s, steps a switch, tokens/s by rows when settled")
        print(f"  {'':<8}{'':8}{'':8}  {' '.join(f'{rows:7}' for rows in ROWS)}")
        for name, result in each.results.items():
            phases = " ".join(f"{speed:7.0f}" for speed in result.phases)
            every = f"{result.steps / result.switches:.0f}" if result.switches else "-"
            print(f"  {name:<8}{result.tokens_per_s:8.0f}{every:>8}  {phases}")
        print(
            f"  worst phase / no drafts {each.worst_to_plain:.3f}, "
            f"/ best fixed {each.worst_to_fixed:.3f}"
        )
        print(f"  all tokens / best other law {each.to_best_other:.4f} ({each.best_other})\n")
    print("all tokens over all grids / best other law, by case")
    for case, ratio in report.ahead().items():
        print(f"  {case:<10}{ratio:7.4f}")
    print("switches at constant load: without prompt chunks, with three patterns of them")
    for found in report.chunks:
        patterns = " ".join(f"{count:4}" for count in found.with_chunks)
        print(f"  {found.grid:<10}{found.rows:4} rows {found.without:4}  {patterns}")
    for some in report.come_and_go:
        print(
            f"four rows that come and go, {some.grid}: {some.switches} switches in "
            f"{some.steps} steps"
        )
    print("tokens/s with drafts by row over those where all rows draft alike")
    for gain in report.gains:
        print(f"  {gain.grid:<10}{gain.rows:4} rows {gain.ratio:7.3f}")
    print()
