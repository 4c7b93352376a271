"""What speculation does to speed, by task, draft length and batch, on prompts never trained on.

Prints one table: what is accepted by task and drafter, one stream with each fixed draft length and
as a chain and a tree, the cost of a draft step, and batch by draft length with step time, tokens/s
and acceptance length.

    python benchmarks/speculation.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                     [--drafter-dir DIR] [--drafter NAME]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from common import Goal, Machine, benchmark_parser, conclude
from draftgate.engine import Engine, EngineConfig, Target, load_target
from draftgate.engine.linear import compute_dtype
from held_out import add_folders, held_out_prompts
from speculation_cost import DraftCost, measure_draft_cost
from speculation_runs import (
    Acceptance,
    Cell,
    LoneStream,
    measure_acceptance,
    measure_cells,
    measure_lone_streams,
)
from speculation_table import print_table

__all__ = ["TASKS", "Bounds", "Plan", "Report", "goals", "main", "measure"]

TASKS = ("chat", "code", "rewrite")

TREE = 4
"""Width of the trees that are measured beside chains."""


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    draft_lens: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8)
    """Fixed draft lengths K; 0, with which the others are compared, is one of them."""
    accepted_draft_len: int = 4
    """The one with which acceptance is measured."""
    prompts: int = 36
    """Held-out prompts of each task by which acceptance is measured, many at once."""
    rows: int = 16
    """How many of them run together."""
    tokens: int = 128
    """Longest answer to each."""
    lone_prompts: int = 6
    """Prompts of each task, one after the other, with each draft length."""
    lone_tokens: int = 64
    """Longest answer to each."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Generations that run together."""
    batch_steps: int = 40
    """Steps that are timed of each batch with each draft length, in each round."""
    batch_rounds: int = 2
    """Rounds over the draft lengths, forwards and backwards in turn."""
    cost_rounds: int = 40
    """Interleaved rounds for the cost of a draft step."""


QUICK = Plan(
    draft_lens=(0, 4),
    prompts=8,
    tokens=48,
    lone_prompts=2,
    lone_tokens=32,
    batches=(1, 16),
    batch_steps=8,
    batch_rounds=1,
    cost_rounds=8,
)


@dataclass(frozen=True)
class Bounds:
    """What `--check` asks for."""

    length_chat: float = 2.0
    """Acceptance length at K = 4, greedy."""
    length_code: float = 2.3
    length_rewrite: float = 2.8
    speedup_chat: float = 1.4
    """One stream at the best fixed draft length, tokens/s over that of K = 0 in the same run."""
    speedup_code: float = 1.6
    speedup_rewrite: float = 2.2
    draft_step: float = 0.09
    """One draft step of the chain over a pass of the target, both for one row."""


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    drafter: str
    plan: Plan
    acceptance: tuple[Acceptance, ...]
    lone_streams: tuple[LoneStream, ...]
    cost: DraftCost | None
    """None where the drafter has no chain of EAGLE's."""
    cells: tuple[Cell, ...]


def main(
    argv: Sequence[str] | None = None, bounds: Bounds | None = None, plan: Plan | None = None
) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure what speculation does to speed on prompts never trained on.",
        quick="less of everything",
    )
    add_folders(parser)
    parser.add_argument("--drafter", default="hybrid", help="its kind (default: hybrid)")
    options = parser.parse_args(argv)
    target = load_target(options.model_dir, compute_dtype("auto", torch.device("cpu")))
    config = EngineConfig(drafter=options.drafter, drafter_dir=str(options.drafter_dir))
    plan = plan or (QUICK if options.quick else Plan())
    prompts: dict[str, list[list[int]]] = {task: [] for task in TASKS}
    for task, ids in held_out_prompts(options.model_dir):
        prompts[task].append(ids)
    report = measure(target, config, prompts, plan)
    reached = goals(report, bounds or Bounds())
    return conclude(options, report, reached, lambda: _print(report))


def measure(
    target: Target, config: EngineConfig, prompts: Mapping[str, Sequence[Sequence[int]]], plan: Plan
) -> Report:
    """Measure all that `plan` says. prompts: token ids by task."""
    acceptance: list[Acceptance] = []
    eagle = config.drafter in ("hybrid", "eagle")
    drafters = [(config.drafter, config.draft_width)]
    if eagle:
        drafters += [("eagle", config.draft_width), (config.drafter, TREE), ("eagle", TREE)]
    for drafter, draft_width in dict.fromkeys(drafters):
        accepting = replace(
            config,
            drafter=drafter,
            draft_len=plan.accepted_draft_len,
            draft_width=draft_width,
            max_batch_rows=plan.rows,
        )
        with ExitStack() as stack:
            engine = _engine(target, accepting, stack)
            for task in TASKS:
                chosen = prompts[task][: plan.prompts]
                acceptance.append(measure_acceptance(engine, task, chosen, plan.tokens))
    lone_streams: list[LoneStream] = []
    cells: list[Cell] = []
    with ExitStack() as stack:
        config = replace(config, max_batch_rows=max(plan.batches))
        engines = {
            draft_len: _engine(target, replace(config, draft_len=draft_len), stack)
            for draft_len in plan.draft_lens
        }
        lone = list(engines.values())
        for draft_len in plan.draft_lens:
            if eagle and draft_len > 1 and config.draft_width != TREE:
                tree = replace(config, draft_len=draft_len, draft_width=TREE)
                lone.append(_engine(target, tree, stack))
        for task in TASKS:
            chosen = prompts[task][: plan.lone_prompts]
            lone_streams.extend(measure_lone_streams(lone, task, chosen, plan.lone_tokens))
        of_each = zip(*(prompts[task] for task in TASKS), strict=False)
        mixed = [ids for several in of_each for ids in several]
        for rows in plan.batches:
            cells.extend(measure_cells(engines, mixed[:rows], plan.batch_steps, plan.batch_rounds))
    return Report(
        machine=Machine.this(),
        model=target.config.name,
        drafter=config.drafter,
        plan=plan,
        acceptance=tuple(acceptance),
        lone_streams=tuple(lone_streams),
        cost=measure_draft_cost(target, config, prompts["chat"][0], plan.cost_rounds)
        if eagle
        else None,
        cells=tuple(cells),
    )


def goals(report: Report, bounds: Bounds) -> list[Goal]:
    """What the report is held to."""
    most = float("inf")
    found = []
    for task in TASKS:
        accepted = next(
            a for a in report.acceptance if (a.task, a.drafter) == (task, report.drafter)
        )
        bound = getattr(bounds, f"length_{task}")
        name = f"acceptance length, {task}, K = {accepted.draft_len}"
        found.append(Goal(name, accepted.length, bound, most))
        streams = [stream for stream in report.lone_streams if stream.task == task]
        usual = min(stream.draft_width for stream in streams)
        streams = [stream for stream in streams if stream.draft_width == usual]
        best = max(streams, key=lambda stream: stream.speedup)
        bound = getattr(bounds, f"speedup_{task}")
        name = f"speedup of one stream, {task}, best K = {best.draft_len}"
        found.append(Goal(name, best.speedup, bound, most))
    if report.cost is not None:
        share, least = report.cost.share, float("-inf")
        found.append(Goal("draft step / target pass", share, least, bounds.draft_step))
    return found


def _engine(target: Target, config: EngineConfig, stack: ExitStack) -> Engine:
    """An engine whose steps run on this thread, until the stack is left."""
    engine = Engine(target, config)
    stack.callback(engine.close)
    return engine


def _print(report: Report) -> None:
    machine = report.machine
    print(f"{report.model} in {machine.dtype}, greedy, on {machine.cpu}, {machine.threads} threads")
    print(f"torch {machine.torch}, topics never trained on\n")
    print_table(report.drafter, report.acceptance, report.lone_streams, report.cost, report.cells)
    print()


if __name__ == "__main__":
    raise SystemExit(main())
