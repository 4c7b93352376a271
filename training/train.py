"""The training loop: seeded, resumable, with a log of what was accepted at each position."""

from __future__ import annotations

import functools
import json
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.progress import Progress
from torch import nn

from draftgate.errors import DraftgateError, ErrorCode
from training.agreement import Agreement, agreement
from training.data import Batch, Batches, Example
from training.loss import Teacher, chain_loss
from training.network import EagleNetwork

__all__ = ["Recipe", "judge", "train"]


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    epochs: int = 3
    steps: int = 3
    """Drafts in a chain (training-time test)."""
    judged_steps: int = 4
    """Drafts in a chain when it is judged."""
    answer_tokens: int = 1024
    """About so many chains in a batch."""
    learning_rate: float = 1.2e-3
    """At its highest, after the warm-up; it falls to a twentieth along a cosine."""
    warmup: int = 60
    """Batches over which it rises."""
    weight_decay: float = 0.01
    sharpness: float = 0.4
    """Share of each target distribution that is moved to its most likely token."""
    seed: int = 0
    """Decides the initial weights and the order of the batches."""
    log_every: int = 25
    judge_every: int = 250
    """Batches between two looks at held-out prompts."""
    save_every: int = 100


def train(
    network: EagleNetwork,
    teacher: Teacher,
    batches: Batches,
    held_out: Mapping[str, Sequence[Example]],
    judges: Batches,
    folder: Path,
    recipe: Recipe,
) -> None:
    """Run the recipe from where `folder` says it stands; write its state and `log.jsonl` there.

    Raises DraftgateError: FAILED_PRECONDITION where it stands in another recipe, or in one over
    another number of batches.
    """
    decayed = [p for p in network.parameters() if p.dim() > 1]
    plain = [p for p in network.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    plan = [(epoch, len(batches.indices(epoch))) for epoch in range(recipe.epochs)]
    total = sum(count for _, count in plan)
    done = _restore(folder, network, optimiser, recipe, total)
    log = (folder / "log.jsonl").open("a", encoding="utf-8")
    recent: list[float] = []
    with log, Progress() as progress:
        bar = progress.add_task("training (batches)", total=total, completed=done)
        for number, batch in _remaining(batches, plan, done):
            begun_s = time.perf_counter()
            for group in optimiser.param_groups:
                group["lr"] = _rate(recipe, number, total)
            loss = chain_loss(network, teacher, batch, recipe.steps, recipe.sharpness)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            recent.append(time.perf_counter() - begun_s)
            progress.update(bar, completed=number + 1)
            if (number + 1) % recipe.log_every == 0:
                seen = agreement(network, teacher, batch, recipe.steps)
                _log(
                    log,
                    number + 1,
                    total,
                    loss=round(float(loss.detach()), 4),
                    s=round(sum(recent) / len(recent), 3),
                    train=_rounded(seen),
                )
                recent = []
            if (number + 1) % recipe.judge_every == 0 or number + 1 == total:
                found = judge(network, teacher, held_out, judges, recipe.judged_steps)
                _log(log, number + 1, total, **{t: _rounded(a) for t, a in found.items()})
            if (number + 1) % recipe.save_every == 0 or number + 1 == total:
                _save(folder, network, optimiser, number + 1, recipe, total)


def judge(
    network: EagleNetwork,
    teacher: Teacher,
    held_out: Mapping[str, Sequence[Example]],
    judges: Batches,
    steps: int,
) -> dict[str, Agreement]:
    """Agreement on held-out examples by task. They are the first ones of `judges`, in order."""
    found, at = {}, 0
    for task, examples in held_out.items():
        chunks = [range(i, min(i + 4, len(examples))) for i in range(0, len(examples), 4)]
        parts = [
            agreement(network, teacher, judges.batch([at + i for i in chunk]), steps)
            for chunk in chunks
        ]
        found[task] = functools.reduce(operator.add, parts)
        at += len(examples)
    return found


def _remaining(
    batches: Batches, plan: Sequence[tuple[int, int]], done: int
) -> Iterator[tuple[int, Batch]]:
    """The batches not done yet with their numbers, over all epochs."""
    number = 0
    for epoch, count in plan:
        if number + count > done:
            first = max(done - number, 0)
            yield from enumerate(batches.epoch(epoch, first), number + first)
        number += count


def _rate(recipe: Recipe, number: int, total: int) -> float:
    if number < recipe.warmup:
        return recipe.learning_rate * (number + 1) / recipe.warmup
    share = (number - recipe.warmup) / max(total - recipe.warmup, 1)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * share)))


def _rounded(found: Agreement) -> dict[str, object]:
    return {
        "rates": [round(rate, 3) for rate in found.rates],
        "acceptance_length": round(found.acceptance_length, 3),
    }


def _log(log: TextIO, number: int, total: int, **values: object) -> None:
    print(json.dumps({"batch": number, "of": total, **values}), file=log, flush=True)


def _save(
    folder: Path,
    network: EagleNetwork,
    optimiser: torch.optim.Optimizer,
    done: int,
    recipe: Recipe,
    total: int,
) -> None:
    half = folder / "state.half"
    state = {
        "network": network.state_dict(),
        "optimiser": optimiser.state_dict(),
        "done": done,
        "recipe": asdict(recipe),
        "total": total,
    }
    torch.save(state, half)
    half.rename(folder / "state.pt")


def _restore(
    folder: Path,
    network: EagleNetwork,
    optimiser: torch.optim.Optimizer,
    recipe: Recipe,
    total: int,
) -> int:
    """Batches done before, with their state loaded."""
    path = folder / "state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, now in (("recipe", asdict(recipe)), ("total", total)):
        if state.get(name) != now:
            raise DraftgateError(
                ErrorCode.FAILED_PRECONDITION,
                f"{path}: was made with {name} {state.get(name)}, not {now}; "
                "remove it to train from the start",
            )
    network.load_state_dict(state["network"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["done"])
