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

import argparse
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from common import Goal, Machine, print_goals, write_json
from draftgate.contract import FinishReason
from draftgate.engine import Engine, EngineConfig, Output, Request, Target, load_target
from draftgate.sampling import SamplingParams
from draftgate.text import Message, Tokenizer

__all__ = ["Comparison", "Plan", "Report", "goals", "main", "measure"]

_ROOT = Path(__file__).parent.parent
_MODEL_DIR = _ROOT / "models" / "smollm2-135m-instruct-fp8"
_DRAFTER_DIR = _ROOT / "drafters" / "smollm2-135m-instruct-eagle3"
_PROMPTS = Path(__file__).parent / "data" / "held_out.json"

_NEAR = 0.5
"""A gap, in logits, that bf16's 8 bits of a logit near 16 cannot be told apart from none."""


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    prompts: int = 40
    tokens: int = 64
    draft_len: int = 4


QUICK = Plan(prompts=10, tokens=48)


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


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    machine: Machine
    model: str
    plan: Plan
    comparisons: list[Comparison]


def measure(
    target: Target,
    exact: Target,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    plan: Plan,
) -> Report:
    """exact: the same model in fp32."""
    plain = replace(config, draft_len=0)
    alone = [_generate(target, plain, [ids], plan.tokens)[0] for ids in prompts]
    drafting = replace(config, draft_len=plan.draft_len)
    drafted = [_generate(target, drafting, [ids], plan.tokens)[0] for ids in prompts]
    together = _generate(target, plain, prompts, plan.tokens)
    return Report(
        Machine.this(),
        target.config.name,
        plan,
        [
            _compare(f"drafts of {plan.draft_len}", prompts, alone, drafted, exact),
            _compare("one batch of all", prompts, alone, together, exact),
        ],
    )


def goals(report: Report) -> list[Goal]:
    """Every text parts at a near tie."""
    return [
        Goal(f"widest gap, {c.name}", c.gaps[-1] if c.gaps else 0.0, float("-inf"), _NEAR)
        for c in report.comparisons
    ]


def _generate(
    target: Target, config: EngineConfig, prompts: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """Greedy answers to all prompts at once."""
    engine = Engine(target, replace(config, max_batch_rows=max(len(prompts), 1)))
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    for number, ids in enumerate(prompts):

        def take(output: Output, number: int = number) -> None:
            answers[number].extend(output.token_ids)
            if output.finish_reason is not FinishReason.NONE:
                ended[number].set()

        engine.submit(Request(str(number), tuple(ids), params), take)
    engine.start()
    for event in ended:
        event.wait()
    engine.close()
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
        widest = found.gaps[-1] if found.gaps else 0.0
        print(
            f"{found.name:>18}{found.changed:>4} / {found.answers:<3}"
            f"{found.changed / found.tokens:>9.2%}{low:>12.3f}{high:>8.3f}{widest:>8.3f}"
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
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else Plan()
    tokenizer = Tokenizer.load(options.model_dir)
    prompts = json.loads(_PROMPTS.read_text(encoding="utf-8"))[: plan.prompts]
    ids = [tokenizer.encode_chat([Message("user", prompt["text"])]) for prompt in prompts]
    config = EngineConfig(drafter="hybrid", drafter_dir=str(options.drafter_dir))
    target = load_target(options.model_dir, torch.bfloat16)
    exact = load_target(options.model_dir, torch.float32)
    report = measure(target, exact, config, ids, plan)
    _print(report)
    found = goals(report)
    if options.json is not None:
        write_json(options.json, report, found)
    met = print_goals(found)
    return 1 if options.check and not met else 0


if __name__ == "__main__":
    raise SystemExit(main())
