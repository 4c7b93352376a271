"""`draftgate gate replay`: what laws of the draft length make of a load, without a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftgate.cli.gate_plot import draw_replays
from draftgate.errors import invalid_argument
from draftgate.speculation import CostTable, Gate
from draftgate.speculation.grids import find_costs, grid_names
from draftgate.speculation.inputs import read_phases, read_requests, read_table
from draftgate.speculation.laws import AutoLaw, EmaLaw, FixedLaw, GoodputLaw, Law, TableLaw
from draftgate.speculation.replay import Replay, replay
from draftgate.speculation.world import World

__all__ = ["Acceptance", "Costs", "replay_laws"]

Costs = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help=f"A table of step times, or a shipped one: {', '.join(grid_names())}.",
        show_default=False,
    ),
]
Acceptance = Annotated[
    Path,
    typer.Option(metavar="FILE", help="How likely drafts are to stand.", show_default=False),
]

_LAWS = "auto, off, fixed:K, table:FILE, ema or goodput"

_MOST_COLUMNS = 12
"""More phases than this are shown together by their number of rows."""


def replay_laws(
    costs: Costs,
    acceptance: Acceptance,
    load: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Rows over time, or a recording.", show_default=False),
    ],
    law: Annotated[
        list[str] | None,
        typer.Option(metavar="LAW", help=f"{_LAWS}; again for more. [default: auto and off]"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the chance that drafts stand.")] = 0,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw it there (needs matplotlib).")
    ] = None,
) -> None:
    """Tokens a second, by phase of the load, that laws of the draft length would have brought."""
    table = find_costs(costs)
    world = World(table, read_requests(acceptance), read_phases(load))
    makers = {name: _maker(name, table) for name in law or ("auto", "off")}
    fixed = {k: replay(FixedLaw(k), world, seed=seed) for k in table.draft_lens}
    found = {name: replay(make(), world, seed=seed) for name, make in makers.items()}
    best = _Best.of(fixed)
    for line in _table(found, best):
        typer.echo(line)
    if png is not None:
        draw_replays(png, found, best.tokens_per_s)


@dataclass(frozen=True)
class _Best:
    """The best fixed draft length of each phase: what no law knows beforehand."""

    phases: Sequence[tuple[int, float, float]]
    """Draft length, tokens and seconds."""

    @classmethod
    def of(cls, fixed: Mapping[int, Replay]) -> _Best:
        phases = []
        for number in range(len(next(iter(fixed.values())).phases)):
            best = max(fixed, key=lambda k, n=number: (fixed[k].phases[n].tokens_per_s, -k))  # type: ignore[misc]
            phase = fixed[best].phases[number]
            phases.append((best, float(phase.tokens), phase.seconds))
        return cls(phases)

    @property
    def tokens_per_s(self) -> Sequence[float]:
        return [tokens / seconds for _, tokens, seconds in self.phases]


def _maker(name: str, costs: CostTable) -> Callable[[], Law]:
    """Makes the law of this name anew.

    Raises DraftgateError(INVALID_ARGUMENT) where there is none or it does not fit the costs.
    """
    lens = costs.draft_lens
    kind, _, argument = name.partition(":")
    if kind == "fixed" and argument:
        if argument not in map(str, lens):
            raise invalid_argument("law", name, f"fixed:K with K in {', '.join(map(str, lens))}")
        return lambda: FixedLaw(int(argument))
    if kind == "table" and argument:
        table = read_table(Path(argument))
        for draft_len in table.values():
            if draft_len not in lens:
                allowed = f"draft lengths that costs has: {', '.join(map(str, lens))}"
                raise invalid_argument(f"{argument}: from_rows", draft_len, allowed)
        return lambda: TableLaw(table)
    makers: dict[str, Callable[[], Law]] = {
        "auto": lambda: AutoLaw(Gate(lens, costs)),
        "off": lambda: FixedLaw(0),
        "ema": lambda: EmaLaw(lens),
        "goodput": lambda: GoodputLaw(costs, lens),
    }
    if name not in makers:
        raise invalid_argument("law", name, _LAWS)
    return makers[name]


def _table(found: Mapping[str, Replay], best: _Best) -> list[str]:
    """Lines of columns: a law, its tokens a second by phase and over all, its switches."""
    rows = [phase.rows for phase in next(iter(found.values())).phases]
    columns = [[number] for number in range(len(rows))]
    if len(rows) > _MOST_COLUMNS:
        columns = [[i for i, n in enumerate(rows) if n == each] for each in sorted(set(rows))]
    lines = [["rows", *(str(rows[column[0]]) for column in columns), "all", "switches"]]
    for name, each in found.items():
        parts = [(phase.tokens, phase.seconds) for phase in each.phases]
        lines.append([name, *_speeds(parts, columns), str(each.switches)])
    ideal = [(tokens, seconds) for _, tokens, seconds in best.phases]
    lines.append(["best fixed", *_speeds(ideal, columns), ""])
    if len(columns) == len(rows):
        lines.append(["  its K", *(str(draft_len) for draft_len, _, _ in best.phases), "", ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)]
        ).rstrip()
        for line in lines
    ]


def _speeds(phases: Sequence[tuple[float, float]], columns: Sequence[Sequence[int]]) -> list[str]:
    """Tokens a second of the phases in each column, and of all."""
    groups = [*columns, range(len(phases))]
    return [
        f"{sum(phases[i][0] for i in group) / sum(phases[i][1] for i in group):.0f}"
        for group in groups
    ]
