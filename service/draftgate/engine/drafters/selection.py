"""How a model's drafter picks its tokens: as the row itself does, from its own distribution.

A greedy row's draft is the drafter's most likely token. A row under rejection sampling draws it and
reports the distribution. A row coupled to a seed races with the noise that the target will use at
that position, so that the two agree as often as their distributions allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftgate.engine.sampler import RowSampler, filter_probabilities, most_likely

__all__ = ["Likeliest", "Picked", "likeliest", "pick"]


@dataclass(frozen=True)
class Picked:
    """The tokens picked for some rows at one draft position."""

    ids: list[int]
    """[rows]: places in the drafter's vocabulary."""
    probabilities: torch.Tensor | None
    """[rows, n] in fp32, what the rows that drew by chance drew from; None: no row did."""


def pick(
    logits: torch.Tensor,
    samplers: Sequence[RowSampler],
    positions: Sequence[int],
    vocabulary: torch.Tensor | None,
    generator: torch.Generator,
) -> Picked:
    """One token a row.

    logits: [rows, n]. positions: [rows] absolute positions of the tokens picked. vocabulary: [n]
    the target's ids of the drafter's tokens, None when they are the same. generator: chance for
    the rows that have no seed.
    """
    sampled = [index for index, sampler in enumerate(samplers) if not sampler.params.greedy]
    if not sampled:
        return Picked(most_likely(logits), None)
    probabilities = logits.to(torch.float32, copy=True)
    for setting, rows in _alike(samplers, sampled).items():
        params = samplers[rows[0]].params
        chosen = (logits[rows].float() / setting[0]).softmax(-1)
        probabilities[rows] = filter_probabilities(chosen, params)
    drawn = [index for index in sampled if not samplers[index].params.coupled]
    coupled = [index for index in sampled if samplers[index].params.coupled]
    # In fp64: fp32 noise is 0 once in 10^7 draws, and then a token of no likelihood would win.
    noise = torch.ones(probabilities.shape, dtype=torch.float64, device=logits.device)
    free = [index for index in drawn if samplers[index].params.seed is None]
    if free:
        noise[free] = noise.new_empty((len(free), noise.shape[1])).exponential_(generator=generator)
    for index in drawn:
        if samplers[index].params.seed is not None:
            noise[index].exponential_(generator=samplers[index].generator)
    if coupled:
        keyed = torch.stack([samplers[index].noise(positions[index]) for index in coupled])
        noise[coupled] = keyed if vocabulary is None else keyed[:, vocabulary]
    race = probabilities / noise.clamp_min_(1e-300)
    return Picked(most_likely(race), probabilities if drawn else None)


@dataclass(frozen=True)
class Likeliest:
    """What rows are likeliest to go on with, the likeliest first."""

    ids: list[list[int]]
    """[rows, n]: places in the drafter's vocabulary."""
    log_likelihoods: list[list[float]]
    """[rows, n]: natural; -inf where the row cannot go on so."""


def likeliest(
    logits: torch.Tensor,
    samplers: Sequence[RowSampler],
    positions: Sequence[int],
    vocabulary: torch.Tensor,
    count: int,
) -> Likeliest:
    """The `count` likeliest tokens of each row, none of which draws by chance.

    Arguments as for `pick`. A coupled row's noise is known, and with it decided what the target
    picks if the drafter sees its distribution right; the shares in the race say how clearly.
    """
    likelihoods = logits.float().softmax(-1)
    coupled = [index for index, sampler in enumerate(samplers) if not sampler.params.greedy]
    for rows in _alike(samplers, coupled).values():
        params = samplers[rows[0]].params
        chosen = (logits[rows].float() / params.temperature).softmax(-1)
        noise = torch.stack([samplers[row].noise(positions[row])[vocabulary] for row in rows])
        race = filter_probabilities(chosen, params) / noise
        likelihoods[rows] = (race / race.sum(-1, keepdim=True)).float()
    found = likelihoods.topk(min(count, logits.shape[1]), -1)
    return Likeliest(found.indices.tolist(), found.values.log().tolist())


def _alike(
    samplers: Sequence[RowSampler], rows: Sequence[int]
) -> dict[tuple[float, float, int, float], list[int]]:
    """The rows by what shapes their distribution."""
    groups: dict[tuple[float, float, int, float], list[int]] = {}
    for index in rows:
        params = samplers[index].params
        key = (params.temperature, params.min_p, params.top_k, params.top_p)
        groups.setdefault(key, []).append(index)
    return groups
