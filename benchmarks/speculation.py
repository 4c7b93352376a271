"""What speculation does to speed, by task, draft length and batch, on prompts never trained on.

Prints what is accepted by task and drafter, the speed of one stream with each fixed draft length,
the cost of a draft step, and batch by draft length with step time, tokens/s and acceptance length.

    python benchmarks/speculation.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                     [--drafter-dir DIR] [--drafter NAME]
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from common import Goal, Machine, Spread, interleave, print_goals, write_json
from draftgate.contract import DraftSource, FinishReason
from draftgate.engine import Engine, EngineConfig, Output, Request, load_target
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft, DraftQuery, Settled, make_drafter
from draftgate.engine.kv_cache import KVCache
from draftgate.engine.model import Target
from draftgate.engine.sampler import RowSampler
from draftgate.sampling import SamplingParams
from draftgate.text import Message, Tokenizer

__all__ = [
    "Acceptance",
    "Bounds",
    "Cell",
    "DraftCost",
    "Plan",
    "Report",
    "TaskRun",
    "goals",
    "main",
    "measure",
]

_ROOT = Path(__file__).parent.parent
_MODEL_DIR = _ROOT / "models" / "smollm2-135m-instruct-fp8"
_DRAFTER_DIR = _ROOT / "drafters" / "smollm2-135m-instruct-eagle3"
_PROMPTS = Path(__file__).parent / "data" / "held_out.json"

TASKS = ("chat", "code", "rewrite")


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    draft_lens: tuple[int, ...] = (0, 1, 2, 3, 4, 6)
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
    batch_tokens: int = 64
    """Length of each of them, past its end of sequence."""
    rounds: int = 40
    """Interleaved rounds for the cost of a draft step."""


QUICK = Plan(
    draft_lens=(0, 4),
    prompts=8,
    tokens=48,
    lone_prompts=2,
    lone_tokens=32,
    batches=(1, 16),
    batch_tokens=16,
    rounds=8,
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
class Acceptance:
    """One task's prompts with one drafter, greedy."""

    task: str
    drafter: str
    draft_len: int
    length: float
    """Acceptance length: 1 + accepted / verify steps; a step without a draft is none."""
    positions: tuple[float, ...]
    """Of the verify steps that drafted so far, the share that accepted position 1, 2, ..."""
    sources: Mapping[str, int]
    """Verify steps by who drafted."""


@dataclass(frozen=True)
class TaskRun:
    """One task's prompts, one stream, one draft length."""

    task: str
    draft_len: int
    tokens_per_s: float
    """Tokens after the first of each answer, over the time since then."""
    speedup: float
    """Over K = 0."""
    acceptance_length: float


@dataclass(frozen=True)
class Cell:
    """One batch size with one draft length."""

    rows: int
    draft_len: int
    step_ms: float
    """Mean time of a step while all rows decode."""
    tokens_per_s: float
    acceptance_length: float
    tokens_per_step: float
    """Emitted by a row in a step, those without a draft included."""


@dataclass(frozen=True)
class DraftCost:
    """One row: drafting beside the target."""

    target_pass: Spread
    """A pass over one token, keys and values cached, with what the drafter takes in after it."""
    draft_step: Spread
    """One more token of the chain."""
    sync: Spread
    """What the drafter takes in after a pass, whether or not it drafts."""
    share: float
    """Draft step / target pass."""
    sync_share: float


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    drafter: str
    plan: Plan
    acceptance: list[Acceptance] = field(default_factory=list)
    tasks: list[TaskRun] = field(default_factory=list)
    cost: DraftCost | None = None
    cells: list[Cell] = field(default_factory=list)


def measure(
    target: Target, config: EngineConfig, prompts: Mapping[str, Sequence[Sequence[int]]], plan: Plan
) -> Report:
    """prompts: token ids by task."""
    report = Report(Machine.this(), target.config.name, config.drafter, plan)
    for drafter in dict.fromkeys((config.drafter, "eagle")):
        accepting = replace(config, drafter=drafter, draft_len=4, max_batch_rows=plan.rows)
        report.acceptance.extend(_acceptance(target, accepting, prompts, plan))
    engines = {}
    for draft_len in plan.draft_lens:
        engines[draft_len] = Engine(
            target, replace(config, draft_len=draft_len, max_batch_rows=max(plan.batches))
        )
        engines[draft_len].start()
    try:
        for task in TASKS:
            report.tasks.extend(_task(engines, task, prompts[task][: plan.lone_prompts], plan))
        for rows in plan.batches:
            report.cells.extend(_batch(engines, rows, prompts, plan))
    finally:
        for engine in engines.values():
            engine.close()
    return replace(report, cost=_draft_cost(target, config, prompts["chat"][0], plan))


def goals(report: Report, bounds: Bounds) -> list[Goal]:
    """The bounds beside what was measured."""
    found = []
    most = float("inf")
    for task in TASKS:
        runs = [run for run in report.tasks if run.task == task]
        at_four = next(
            a for a in report.acceptance if (a.task, a.drafter) == (task, report.drafter)
        )
        name = f"acceptance length, {task}, K = {at_four.draft_len}"
        found.append(Goal(name, at_four.length, getattr(bounds, f"length_{task}"), most))
        best = max(runs, key=lambda run: run.speedup)
        bound = getattr(bounds, f"speedup_{task}")
        name = f"speedup of one stream, {task}, best K = {best.draft_len}"
        found.append(Goal(name, best.speedup, bound, most))
    assert report.cost is not None
    low = float("-inf")
    found.append(Goal("draft step / target pass", report.cost.share, low, bounds.draft_step))
    return found


@dataclass
class _Run:
    """One generation's outputs with their times."""

    outputs: list[tuple[float, Output]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, output: Output) -> None:
        self.outputs.append((time.perf_counter(), output))
        if output.finish_reason is not FinishReason.NONE:
            self.ended.set()


@dataclass
class _Tally:
    """Sums over generations."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    accepted: int = 0
    outputs: int = 0
    reached: dict[int, int] = field(default_factory=dict)
    passed: dict[int, int] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)

    def add(self, run: _Run) -> None:
        times = [at for at, _ in run.outputs]
        later = [output for _, output in run.outputs[1:]]
        self.seconds += times[-1] - times[0]
        for output in later:
            self.tokens += len(output.token_ids)
            self.outputs += 1
            step = output.verify_step
            if step is None:
                continue
            self.steps += 1
            self.accepted += step.accepted
            name = DraftSource(step.source).name.lower()
            self.sources[name] = self.sources.get(name, 0) + 1
            for position in range(1, len(step.draft_ids) + 1):
                self.reached[position] = self.reached.get(position, 0) + 1
                passed = step.accepted >= position
                self.passed[position] = self.passed.get(position, 0) + passed

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 1.0


def _acceptance(
    target: Target,
    config: EngineConfig,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    plan: Plan,
) -> list[Acceptance]:
    """Many prompts at once: what is accepted does not depend on the batch, near ties apart."""
    engine = Engine(target, config)
    engine.start()
    params = SamplingParams(max_tokens=plan.tokens, temperature=0.0)
    found = []
    for task in TASKS:
        runs = [_Run() for _ in prompts[task][: plan.prompts]]
        for number, (run, ids) in enumerate(zip(runs, prompts[task], strict=False)):
            engine.submit(Request(f"{task}-{number}", tuple(ids), params), run)
        tally = _Tally()
        for run in runs:
            run.ended.wait()
            tally.add(run)
        positions = tuple(tally.passed[p] / n for p, n in sorted(tally.reached.items()))
        found.append(
            Acceptance(
                task,
                config.drafter,
                config.draft_len,
                tally.acceptance_length,
                positions,
                tally.sources,
            )
        )
    engine.close()
    return found


def _task(
    engines: Mapping[int, Engine], task: str, prompts: Sequence[Sequence[int]], plan: Plan
) -> list[TaskRun]:
    """Each prompt with every draft length before the next, so that drifts fall on all alike."""
    tallies = {draft_len: _Tally() for draft_len in engines}
    params = SamplingParams(max_tokens=plan.lone_tokens, temperature=0.0)
    for number, ids in enumerate(prompts):
        for draft_len, engine in engines.items():
            run = _Run()
            engine.submit(Request(f"{task}-{number}", tuple(ids), params), run)
            run.ended.wait()
            tallies[draft_len].add(run)
    plain = tallies[0].tokens / tallies[0].seconds
    return [
        TaskRun(
            task=task,
            draft_len=draft_len,
            tokens_per_s=tally.tokens / tally.seconds,
            speedup=tally.tokens / tally.seconds / plain,
            acceptance_length=tally.acceptance_length,
        )
        for draft_len, tally in tallies.items()
    ]


def _batch(
    engines: Mapping[int, Engine],
    rows: int,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    plan: Plan,
) -> list[Cell]:
    """`rows` generations at once, of all tasks in turn, with every draft length."""
    params = SamplingParams(max_tokens=plan.batch_tokens, temperature=0.0, ignore_eos=True)
    chosen = [prompts[TASKS[i % len(TASKS)]][i // len(TASKS)] for i in range(rows)]
    cells = []
    for draft_len, engine in engines.items():
        runs = [_Run() for _ in chosen]
        for number, (run, ids) in enumerate(zip(runs, chosen, strict=True)):
            engine.submit(Request(f"batch-{number}", tuple(ids), params), run)
        for run in runs:
            run.ended.wait()
        cells.append(_cell(rows, draft_len, runs))
    return cells


def _cell(rows: int, draft_len: int, runs: Sequence[_Run]) -> Cell:
    """Of the time in which every row was decoding."""
    begin = max(run.outputs[0][0] for run in runs)
    end = min(run.outputs[-1][0] for run in runs)
    if end <= begin:  # the first had ended before the last began
        end = max(run.outputs[-1][0] for run in runs)
    times: set[float] = set()
    tally = _Tally()
    for run in runs:
        within = [(at, output) for at, output in run.outputs if begin < at <= end]
        tally.add(_Run([run.outputs[0], *within]))
        times.update(at for at, _ in within)
    # A row answers once a step.
    steps = tally.outputs / rows
    return Cell(
        rows=rows,
        draft_len=draft_len,
        step_ms=1e3 * (end - begin) / steps,
        tokens_per_s=tally.tokens / (end - begin),
        acceptance_length=tally.acceptance_length,
        tokens_per_step=tally.tokens / tally.outputs,
    )


def _draft_cost(
    target: Target, config: EngineConfig, prompt: Sequence[int], plan: Plan
) -> DraftCost:
    """One row with its prompt in both caches: chains of 1 and of 5 differ by four draft steps."""
    config = replace(config, drafter="eagle", max_batch_rows=1)
    drafter = make_drafter(config, target)
    assert drafter is not None
    assert drafter.kv_shape is not None
    room = len(prompt) + 32
    shapes = [target.kv_shape, drafter.kv_shape]
    cache = KVCache(shapes, config, room, target.dtype, target.device)
    drafter.attach(cache.stores[1])
    tokens = [*prompt, 1]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    sampler = RowSampler(params, prompt, [], target.config.shape.vocab_size, target.device)
    last = torch.zeros(1, dtype=torch.long)

    def run(start: int, upto: int) -> torch.Tensor:
        span = RowSpan(0, start, upto - start)
        ids = torch.tensor(tokens[start:upto])
        done = target.forward(ids, [span], cache.stores[0], last, drafter.taps)
        assert done.features is not None
        return done.features

    def take_in(start: int, upto: int, features: torch.Tensor) -> None:
        drafter.observe([Settled(0, 0, tokens, start, upto, 0, Draft())], features)

    def draft(count: int) -> None:
        drafter.propose([DraftQuery(0, 0, tokens, count, sampler)])

    upto = len(tokens) - 1
    with torch.inference_mode():
        take_in(0, upto, run(0, upto))
        features = run(upto - 1, upto)
        cases = {
            "pass": lambda: run(upto - 1, upto),
            "sync": lambda: take_in(upto - 1, upto, features),
            "chain of 1": lambda: draft(1),
            "chain of 5": lambda: draft(5),
        }
        found = interleave(cases, plan.rounds)
    steps = [(b - a) / 4 for a, b in zip(found["chain of 1"], found["chain of 5"], strict=True)]
    whole, step, sync = Spread.of(found["pass"]), Spread.of(steps), Spread.of(found["sync"])
    return DraftCost(
        target_pass=whole,
        draft_step=step,
        sync=sync,
        share=step.median_ms / whole.median_ms,
        sync_share=sync.median_ms / whole.median_ms,
    )


def _print(report: Report) -> None:
    machine = report.machine
    print(f"{report.model}, drafter {report.drafter}, on {machine.cpu}, {machine.threads} threads")
    print("\nAcceptance, greedy, on topics never trained on")
    print(f"{'task':>8}{'drafter':>9}{'K':>4}{'length':>8}   accepted at 1, 2, ...")
    for found in report.acceptance:
        rates = " ".join(f"{rate:.2f}" for rate in found.positions)
        by = ", ".join(f"{count} {name}" for name, count in sorted(found.sources.items()))
        print(
            f"{found.task:>8}{found.drafter:>9}{found.draft_len:>4}{found.length:>8.2f}"
            f"   {rates}   (steps: {by})"
        )
    print("\nOne stream")
    print(f"{'task':>8}{'K':>4}{'tokens/s':>10}{'x K=0':>8}{'length':>8}")
    for run in report.tasks:
        print(
            f"{run.task:>8}{run.draft_len:>4}{run.tokens_per_s:>10.1f}{run.speedup:>8.2f}"
            f"{run.acceptance_length:>8.2f}"
        )
    if report.cost is not None:
        cost = report.cost
        print(f"\nOne row: a pass of the target {cost.target_pass.median_ms:.2f} ms")
        print(f"  one draft step {cost.draft_step.median_ms:.2f} ms, {cost.share:.1%} of it")
        print(f"  the drafter's sync {cost.sync.median_ms:.2f} ms, {cost.sync_share:.1%} of it")
    print("\nMany streams, all tasks, greedy")
    print(f"{'rows':>6}{'K':>4}{'step ms':>10}{'tokens/s':>10}{'x K=0':>8}{'length':>8}")
    plain = {cell.rows: cell.tokens_per_s for cell in report.cells if cell.draft_len == 0}
    best = {
        rows: max((c for c in report.cells if c.rows == rows), key=lambda c: c.tokens_per_s)
        for rows in plain
    }
    for cell in report.cells:
        mark = "  best" if cell is best[cell.rows] else ""
        print(
            f"{cell.rows:>6}{cell.draft_len:>4}{cell.step_ms:>10.2f}{cell.tokens_per_s:>10.1f}"
            f"{cell.tokens_per_s / plain[cell.rows]:>8.2f}{cell.acceptance_length:>8.2f}{mark}"
        )
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if `--check` was asked for and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything, within a minute")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    parser.add_argument("--model-dir", type=Path, default=_MODEL_DIR)
    parser.add_argument("--drafter-dir", type=Path, default=_DRAFTER_DIR)
    parser.add_argument("--drafter", default="hybrid")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.load(options.model_dir)
    prompts: dict[str, list[list[int]]] = {task: [] for task in TASKS}
    for prompt in json.loads(_PROMPTS.read_text(encoding="utf-8")):
        ids = tokenizer.encode_chat([Message("user", prompt["text"])])
        prompts[prompt["task"]].append(ids)
    target = load_target(options.model_dir, torch.bfloat16)
    config = EngineConfig(drafter=options.drafter, drafter_dir=str(options.drafter_dir))
    report = measure(target, config, prompts, QUICK if options.quick else Plan())
    _print(report)
    found = goals(report, Bounds())
    if options.json is not None:
        write_json(options.json, report, found)
    met = print_goals(found)
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
