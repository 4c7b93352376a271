"""One step of the embedded engine beside the time that reading its weights takes.

Prints the machine's memory bandwidth, the floor that it sets for a step, step times for 1 to 128
tokens in the pass, and what weights, KV cache and 2,000 short requests do to resident memory.

    python benchmarks/engine_step.py [--quick] [--check] [--json FILE] [--model-dir DIR]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from common import (
    Bandwidth,
    Goal,
    Machine,
    MemoryUse,
    Spread,
    bandwidth_of,
    bandwidth_readers,
    benchmark_parser,
    conclude,
    interleave,
)
from draftgate.checkpoint import ConsoleProgress, ensure_checkpoint, packaged_source
from draftgate.engine import EngineConfig, Request, Target
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft
from draftgate.engine.kv_cache import KVCache, KVStore
from draftgate.engine.sampler import RowSampler
from draftgate.engine.scheduler import ScheduledRow
from draftgate.engine.sequence import Sequence as Row
from draftgate.engine.step import Stepper
from draftgate.sampling import SamplingParams
from engine_memory import (
    KVMemory,
    ShortRequests,
    WeightMemory,
    load_measured,
    measure_kv_cache,
    measure_short_requests,
)

__all__ = ["Bounds", "Plan", "Report", "StepTime", "goals", "main", "measure"]

_MODEL_DIR = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct-fp8"
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int = 60
    """Interleaved rounds over all step sizes and bandwidth methods."""
    sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Tokens in the pass."""
    cached_tokens: int = 300
    """Positions that every row has in the cache before the step."""
    buffer_bytes: int = 256 * _MIB
    """Least size of the buffer read for the bandwidth: no cache may hold it."""
    kv_rows: int = 16
    kv_budget_bytes: int = 256 * _MIB
    short_requests: int = 2000
    short_rows: int = 32


QUICK = Plan(rounds=8, kv_rows=8, kv_budget_bytes=96 * _MIB, short_requests=200)


@dataclass(frozen=True)
class Bounds:
    """What `--check` holds the engine to."""

    step_to_floor: float = 2.8
    """Batch-1 decode step at K = 0, as a multiple of the floor."""
    weight_copies: float = 1.25
    """Growth of resident memory at load, as a multiple of the weights: once, not twice."""
    kv_share_low: float = 0.9
    """Growth of the process's own memory with a full KV cache, as a share of its budget."""
    kv_share_high: float = 1.1
    short_growth: float = 0.02
    """Growth of resident memory from the first to the last quarter of the short requests."""


@dataclass(frozen=True)
class StepTime:
    """One step size."""

    rows: int
    tokens_per_row: int
    """1, or 1 + K where K drafted tokens are verified."""
    time: Spread
    to_floor: float
    """Median as a multiple of the floor."""


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    plan: Plan
    weights: WeightMemory
    bandwidth: Bandwidth
    floor_ms: float
    """Reading every weight once at that bandwidth."""
    steps: tuple[StepTime, ...]
    kv_cache: KVMemory
    short_requests: ShortRequests


def main(
    argv: Sequence[str] | None = None, bounds: Bounds | None = None, plan: Plan | None = None
) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure one step of the embedded engine and what it holds in memory.", quick="fewer rounds"
    )
    parser.add_argument("--model-dir", type=Path, help="checkpoint folder (default: the packaged)")
    options = parser.parse_args(argv)
    plan = plan or (QUICK if options.quick else Plan())
    report = measure(options.model_dir or _packaged(), plan)
    reached = goals(report, bounds or Bounds())
    return conclude(options, report, reached, lambda: _print(report))


def measure(model_dir: Path, plan: Plan) -> Report:
    """Load the checkpoint in bf16 and measure all that `plan` says."""
    target, weights = load_measured(model_dir, torch.bfloat16)
    bandwidth, step_samples_s = _time_steps(target, plan, weights.weight_bytes)
    floor_ms = weights.weight_bytes / bandwidth.bytes_per_s * 1e3
    steps = []
    for (rows, tokens), samples_s in step_samples_s.items():
        spread = Spread.of(samples_s)
        steps.append(StepTime(rows, tokens, spread, spread.median_ms / floor_ms))
    return Report(
        machine=Machine.this(),
        model=target.config.name,
        plan=plan,
        weights=weights,
        bandwidth=bandwidth,
        floor_ms=floor_ms,
        steps=tuple(steps),
        kv_cache=measure_kv_cache(target, plan.kv_rows, plan.kv_budget_bytes),
        short_requests=measure_short_requests(target, plan.short_rows, plan.short_requests),
    )


def goals(report: Report, bounds: Bounds) -> list[Goal]:
    """What the report is held to."""
    least = float("-inf")
    alone = next(step for step in report.steps if (step.rows, step.tokens_per_row) == (1, 1))
    return [
        Goal("step at 1 row / floor", alone.to_floor, least, bounds.step_to_floor),
        Goal("weights resident / weights", report.weights.copies, least, bounds.weight_copies),
        Goal(
            "KV cache resident / budget",
            report.kv_cache.share,
            bounds.kv_share_low,
            bounds.kv_share_high,
        ),
        Goal(
            "growth over short requests", report.short_requests.growth, least, bounds.short_growth
        ),
    ]


def _packaged() -> Path:
    with ConsoleProgress(Console(stderr=True)) as progress:
        return ensure_checkpoint(packaged_source(), _MODEL_DIR, progress=progress)


def _time_steps(
    target: Target, plan: Plan, weight_bytes: int
) -> tuple[Bandwidth, dict[tuple[int, int], list[float]]]:
    """The machine's bandwidth and, by (rows, tokens per row), seconds of each step."""
    shapes = [(size, 1) for size in plan.sizes] + [(1, size) for size in plan.sizes if size > 1]
    buffer_bytes = max(weight_bytes, plan.buffer_bytes)
    readers = {f"read: {name}": read for name, read in bandwidth_readers(buffer_bytes).items()}
    with torch.inference_mode():
        bench = _StepBench(target, max(plan.sizes), plan.cached_tokens)
        steps: dict[str, Callable[[], object]] = {
            f"step: {rows} x {tokens}": partial(bench.step, rows, tokens) for rows, tokens in shapes
        }
        samples_s = interleave(readers | steps, plan.rounds)
    bandwidth = bandwidth_of(
        {name.removeprefix("read: "): samples_s[name] for name in readers}, buffer_bytes
    )
    return bandwidth, dict(zip(shapes, (samples_s[name] for name in steps), strict=True))


class _StepBench:
    """Steps as the engine runs them, on rows that are put back to where they were after each.

    One pass of the target, greedy tokens, verification of drafts, outputs: all but queueing.
    """

    def __init__(self, target: Target, rows: int, cached_tokens: int) -> None:
        room = cached_tokens + rows + 1
        config = EngineConfig(max_batch_rows=rows, kv_cache_bytes=1 << 50)
        cache = KVCache([target.kv_shape], config, room, target.dtype, target.device)
        self._stepper = Stepper(target, cache, None, 0, room, time.monotonic)
        generator = random.Random(0)
        vocab_size = target.config.shape.vocab_size
        self._tokens = [generator.randrange(vocab_size) for _ in range(cached_tokens + 1)]
        self._drafts = [generator.randrange(vocab_size) for _ in range(rows)]
        self._rows = [self._row(slot, target) for slot in range(rows)]
        self._fill(target, cache.stores[0], cached_tokens)

    def step(self, rows: int, tokens_per_row: int) -> None:
        """One step over the first `rows` rows, each with `tokens_per_row` - 1 drafts."""
        draft = Draft(tuple(self._drafts[: tokens_per_row - 1]))
        chosen = self._rows[:rows]
        scheduled = [ScheduledRow(row, 1, len(draft.token_ids)) for row in chosen]
        self._stepper.run(scheduled, {row.row_id: draft for row in chosen})
        for row in chosen:
            self._rewind(row)

    def _row(self, slot: int, target: Target) -> Row:
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
        shape = target.config.shape
        row = Row(
            row_id=slot,
            request=Request(str(slot), tuple(self._tokens), params),
            sink=lambda output: None,
            make_sampler=lambda: RowSampler(
                params, self._tokens, [], shape.vocab_size, target.device
            ),
            arrived_s=0.0,
            slot=slot,
            started_s=0.0,
        )
        self._rewind(row)
        return row

    def _rewind(self, row: Row) -> None:
        """All but the last token of the prompt are in the cache."""
        row.tokens = list(self._tokens)
        row.computed = row.prefill_upto = len(self._tokens) - 1

    def _fill(self, target: Target, store: KVStore, tokens: int) -> None:
        """The keys and values of the prompt, in every row."""
        everything = torch.arange(tokens)
        target.forward(
            torch.tensor(self._tokens[:tokens]), [RowSpan(0, 0, tokens)], store, everything[:0]
        )
        for layer in range(target.config.shape.layers):
            keys, values = store.read(layer, 0, 1, tokens)  # [1, kv_heads, tokens, head_dim]
            kv = torch.stack((keys[0], values[0])).permute(2, 0, 1, 3).reshape(tokens, -1)
            for row in self._rows[1:]:
                assert row.slot is not None
                store.write(layer, everything + store.index_of(row.slot, 0), kv)


def _print(report: Report) -> None:
    machine, bandwidth = report.machine, report.bandwidth
    print(f"{report.model} in bf16 on {machine.cpu}, {machine.threads} threads")
    print(f"torch {machine.torch}, medians of {report.plan.rounds} interleaved rounds\n")
    print("Memory bandwidth, reading a buffer once")
    for method, rate in sorted(bandwidth.all_bytes_per_s.items(), key=lambda item: -item[1]):
        print(f"  {method:26}{rate / 1e9:6.1f} GB/s")
    size = report.weights.weight_bytes
    print(f"Floor: {size / 1e6:.0f} MB of weights at that of '{bandwidth.method}': ", end="")
    print(f"{report.floor_ms:.2f} ms a step\n")
    print(f"Step with {report.plan.cached_tokens} cached positions a row")
    print(f"{'rows':>6}{'tokens/row':>12}{'median ms':>11}{'p10':>8}{'p90':>8}{'x floor':>9}")
    for step in report.steps:
        print(
            f"{step.rows:6}{step.tokens_per_row:12}{step.time.median_ms:11.2f}"
            f"{step.time.p10_ms:8.2f}{step.time.p90_ms:8.2f}{step.to_floor:9.2f}"
        )
    _print_memory(report)


def _print_memory(report: Report) -> None:
    weights, kv, short = report.weights, report.kv_cache, report.short_requests
    print("\nResident memory, MB (own + mapped files)")
    print(f"  before load                {_mb(weights.before)}")
    print(f"  after load                 {_mb(weights.after)}")
    print(f"    growth / weights         {weights.copies:8.2f}   the embedding stays a mapped file")
    print(f"  before filling the KV cache{_mb(kv.before)}")
    print(f"  highest                    {_mb(kv.highest)}", end="")
    print(f"   {kv.used_blocks} of {kv.total_blocks} blocks")
    print(f"  after                      {_mb(kv.after)}")
    print(f"    own growth / budget      {kv.share:8.2f}   of {kv.budget_bytes / 1e6:.0f} MB")
    print(f"  {short.requests} short requests")
    print(f"    first quarter            {short.first_quarter_bytes / 1e6:8.1f}")
    print(f"    last quarter             {short.last_quarter_bytes / 1e6:8.1f}", end="")
    print(f"   {short.growth:+.2%}, {short.bytes_per_request:+.0f} bytes a request\n")


def _mb(use: MemoryUse) -> str:
    own, files = use.anonymous_bytes / 1e6, use.file_bytes / 1e6
    return f"{own + files:8.1f} ({own:.0f} + {files:.0f})"


if __name__ == "__main__":
    raise SystemExit(main())
