"""How often bf16 arithmetic changes a greedy text, and how near the tie was that fell otherwise.

Drafts and batches give the target passes over other numbers of tokens, and a CPU's kernels sum in
another order for each. In fp32 no text changes; in bf16 the logits of two tokens that are nearly
equal may change places. Each answer is generated alone without drafts, alone with drafts, and in
one batch without drafts. Where two texts part, the gap is the difference that fp32 arithmetic finds
between the logits of the two tokens.

    python benchmarks/near_ties.py [--quick] [--check] [--json FILE] [--model-dir DIR]
                                   [--drafter-dir DIR]
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from common import Goal, Machine, benchmark_parser, conclude
from draftgate.engine import Engine, EngineConfig, Output, Request, Target, load_target
from draftgate.sampling import SamplingParams
from held_out import add_folders, held_out_prompts

__all__ = ["Bounds", "Comparison", "Plan", "Report", "goals", "main", "measure"]


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    prompts: int = 40
    tokens: int = 64
    draft_len: int = 4


QUICK = Plan(prompts=10, tokens=48)


@dataclass(frozen=True)
class Bounds:
    """What `--check` asks for."""

    gap: float = 0.5
    """Widest gap, in logits: bf16's 8 bits of a logit near 16 cannot tell it from none."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to generate the same answers."""

    name: str
    answers: int
    changed: int
    """Answers that differ somewhere."""
    tokens: int
    """Tokens up to where each pair parts, or to the end: how many had the chance to."""
    gaps: tuple[float, ...]
    """At each parting, in logits, rising."""

    @property
    def widest(self) -> float:
        return self.gaps[-1] if self.gaps else 0.0


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    plan: Plan
    comparisons: tuple[Comparison, ...]


def main(
    argv: Sequence[str] | None = None, bounds: Bounds | None = None, plan: Plan | None = None
) -> int:
    """Run the benchmark. Returns 1 if `--check` was given and a goal was missed."""
    parser = benchmark_parser(
        "Measure how often bf16 arithmetic changes a greedy text, and at what gaps.",
        quick="less of everything",
    )
    add_folders(parser)
    options = parser.parse_args(argv)
    plan = plan or (QUICK if options.quick else Plan())
    prompts = [ids for _, ids in held_out_prompts(options.model_dir)[: plan.prompts]]
    config = EngineConfig(drafter="hybrid", drafter_dir=str(options.drafter_dir))
    target = load_target(options.model_dir, torch.bfloat16)
    exact = load_target(options.model_dir, torch.float32)
    report = measure(target, exact, config, prompts, plan)
    reached = goals(report, bounds or Bounds())
    return conclude(options, report, reached, lambda: _print(report))


def measure(
    target: Target,
    exact: Target,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
) -> Report:
    """Answer the prompts, token ids, in every way. exact: the same model in fp32."""
    plain = Engine(target, replace(config, draft_len=0, max_batch_rows=len(prompts)))
    drafting = Engine(target, replace(config, draft_len=plan.draft_len, max_batch_rows=1))
    with closing(plain), closing(drafting):
        alone = [_generate(plain, [ids], plan.tokens)[0] for ids in prompts]
        drafted = [_generate(drafting, [ids], plan.tokens)[0] for ids in prompts]
        together = _generate(plain, prompts, plan.tokens)
    return Report(
        machine=Machine.this(),
        model=target.config.name,
        plan=plan,
        comparisons=(
            _compare(f"drafts of {plan.draft_len}", prompts, alone, drafted, exact),
            _compare("one batch of all", prompts, alone, together, exact),
        ),
    )


def goals(report: Report, bounds: Bounds) -> list[Goal]:
    """Every text parts at a near tie."""
    least = float("-inf")
    return [Goal(f"widest gap, {c.name}", c.widest, least, bounds.gap) for c in report.comparisons]


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    answers: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for number, ids in enumerate(prompts):

        def take(output: Output, answer: list[int] = answers[number]) -> None:
            answer.extend(output.token_ids)

        engine.submit(Request(str(number), tuple(ids), params), take)
    while any(len(answer) < count for answer in answers):
        engine.step()
    return answers


def _compare(
    name: str,
    prompts: Sequence[Sequence[int]],
    one: Sequence[Sequence[int]],
    other: Sequence[Sequence[int]],
    exact: Target,
) -> Comparison:
    tokens, gaps = 0, []
    for ids, a, b in zip(prompts, one, other, strict=True):
        parted = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        tokens += len(a) if parted is None else parted + 1
        if parted is not None:
            logits = exact.score([*ids, *a[:parted]])[-1]
            gaps.append(abs(float(logits[a[parted]] - logits[b[parted]])))
    return Comparison(name, len(one), len(gaps), tokens, tuple(sorted(gaps)))


def _print(report: Report) -> None:
    plan, machine = report.plan, report.machine
    print(f"{report.model} in bf16 on {machine.cpu}, {machine.threads} threads")
    print(f"{plan.prompts} prompts, {plan.tokens} greedy tokens, beside one alone without drafts\n")
    print(f"{'':>18}{'changed':>9}{'a token':>10}{'median gap':>12}{'p90':>8}{'widest':>8}")
    for found in report.comparisons:
        low, high = np.percentile(found.gaps, (50, 90)) if found.gaps else (0.0, 0.0)
        print(
            f"{found.name:>18}{found.changed:>4} / {found.answers:<3}"
            f"{found.changed / found.tokens:>9.2%}{low:>12.3f}{high:>8.3f}{found.widest:>8.3f}"
        )
    print()


if __name__ == "__main__":
    raise SystemExit(main())
