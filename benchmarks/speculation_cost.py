"""What a step of an EAGLE chain costs beside a pass of its target, both for one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from common import Spread, interleave
from draftgate.engine import EngineConfig
from draftgate.engine.attention import RowSpan
from draftgate.engine.drafters import Draft, DraftQuery, Settled, make_drafter
from draftgate.engine.kv_cache import KVCache
from draftgate.engine.model import Target
from draftgate.engine.sampler import RowSampler
from draftgate.sampling import SamplingParams

__all__ = ["DraftCost", "measure_draft_cost"]


@dataclass(frozen=True)
class DraftCost:
    """One row: drafting beside the target."""

    target_pass: Spread
    """A pass over one token, keys and values cached, that also returns what the drafter taps."""
    draft_step: Spread
    """One more token of the chain."""
    sync: Spread
    """What the drafter takes in after a pass while it drafts; else a few passes' are one."""
    share: float
    """Draft step / target pass."""
    sync_share: float


def measure_draft_cost(
    target: Target, config: EngineConfig, prompt: Sequence[int], rounds: int
) -> DraftCost:
    """One row with its prompt in both caches: chains of 1 and of 5 differ by four draft steps."""
    config = replace(config, drafter="eagle", draft_width=1, max_batch_rows=1)
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
    drafted = Draft((1,))  # what is settled is taken in at once while there are drafts

    def run(start: int, upto: int) -> torch.Tensor:
        span = RowSpan(0, start, upto - start)
        ids = torch.tensor(tokens[start:upto])
        done = target.forward(ids, [span], cache.stores[0], last, drafter.taps)
        assert done.features is not None
        return done.features

    def take_in(start: int, upto: int, features: torch.Tensor) -> None:
        drafter.observe(
            [Settled(0, 0, tokens, start, upto, range(upto - start), drafted)], features
        )

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
        found = interleave(cases, rounds)
    steps = [(b - a) / 4 for a, b in zip(found["chain of 1"], found["chain of 5"], strict=True)]
    whole, step, sync = Spread.of(found["pass"]), Spread.of(steps), Spread.of(found["sync"])
    return DraftCost(
        target_pass=whole,
        draft_step=step,
        sync=sync,
        share=step.median_ms / whole.median_ms,
        sync_share=sync.median_ms / whole.median_ms,
    )
