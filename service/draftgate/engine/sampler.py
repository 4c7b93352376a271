"""From the target's logits to the distribution a request asked for, and to tokens.

Order: penalties, temperature, min_p, top_k, top_p; each works on what the one before left. The
same path serves every verified position, with the drafts before it counted as output, so a token
is drawn from the same distribution whether it was drafted or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftgate.sampling import SamplingParams

__all__ = ["RowSampler", "draw", "filter_probabilities", "most_likely"]

_CANDIDATES = 1024
"""How many likely tokens top_p looks at before it sorts the whole vocabulary."""


class RowSampler:
    """The sampling state of one generation: its penalties' counts and its random numbers."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`output_ids`: tokens of the output emitted before this run."""
        self.params = params
        self._device = device
        self._counts: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        if params.has_penalties:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt_ids, dtype=torch.long, device=device)] = True
            self.observe(output_ids)
        self.generator = torch.Generator(device=device)
        self.generator.seed()

    def observe(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were emitted."""
        if self._counts is not None and self._seen is not None and token_ids:
            ids = torch.tensor(token_ids, dtype=torch.long, device=self._device)
            self._counts.index_add_(0, ids, torch.ones(len(token_ids), device=self._device))
            self._seen[ids] = True

    def penalised(self, logits: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        """logits [positions, vocab] in fp32 with penalties; position j follows drafts[:j]."""
        if self._counts is None or self._seen is None:
            return logits
        counts = self._counts.repeat(logits.shape[0], 1)
        seen = self._seen.repeat(logits.shape[0], 1)
        for index, token in enumerate(drafts):
            counts[index + 1 :, token] += 1
            seen[index + 1 :, token] = True
        params = self.params
        scaled = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits = torch.where(seen, scaled, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def probabilities(self, logits: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        """The distributions [positions, vocab] to draw from, in fp32; not for greedy requests."""
        scaled = self.penalised(logits, drafts) / self.params.temperature
        return filter_probabilities(scaled.softmax(-1), self.params)

    def coupled(self, probabilities: torch.Tensor, first_position: int) -> list[int]:
        """The seeded token at each position: argmax of log p plus position-keyed Gumbel noise.

        A function of the distribution, the seed and the absolute position alone, so it does not
        depend on what was drafted. (Gumbel-max: argmax p / e with e exponential.)
        """
        seed = self.params.seed
        assert seed is not None
        tokens = []
        for offset, row in enumerate(probabilities):
            counter = np.random.Philox(key=seed, counter=[0, 0, 0, first_position + offset])
            # In fp32 the noise is 0 once in 10^7 draws, which over a large vocabulary would let a
            # token of no likelihood win every few hundred positions.
            noise = np.random.Generator(counter).standard_exponential(row.shape[0])
            race = row.double() / torch.from_numpy(noise).to(row.device).clamp_min_(1e-300)
            tokens.append(int(race.argmax()))
        return tokens


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> int:
    """One token from unnormalised probabilities [vocab]."""
    return int(torch.multinomial(probabilities, 1, generator=generator))


def most_likely(scores: torch.Tensor) -> list[int]:
    """The token with the highest of scores [positions, vocab] at each; of equals the first."""
    if scores.device.type == "cpu":
        # torch's search is not vectorised: 160 us a row in bf16, where this takes 12.
        best: list[int] = scores.float().numpy().argmax(-1).tolist()
        return best
    return scores.argmax(-1).tolist()


def filter_probabilities(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply min_p, top_k and top_p to [positions, vocab] and renormalise each row."""
    if params.min_p > 0.0:
        floor = probabilities.amax(-1, keepdim=True) * params.min_p
        probabilities = _renormalised(probabilities.where(probabilities >= floor, 0.0))
    vocab = probabilities.shape[-1]
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    if top_k:
        values, ids = probabilities.topk(top_k, -1)
        values = _renormalised(values)
    elif params.top_p < 1.0:
        values, ids = _enough_candidates(probabilities, params.top_p)
    else:
        return probabilities
    if params.top_p < 1.0:
        # A token stays if the mass before it has not reached top_p: the first always does.
        before = values.cumsum(-1) - values
        values = values.where(before < params.top_p, 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, _renormalised(values))


def _enough_candidates(
    probabilities: torch.Tensor, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens in falling order, at least as many as top_p keeps."""
    if probabilities.shape[-1] > _CANDIDATES:
        values, ids = probabilities.topk(_CANDIDATES, -1)
        if bool((values.sum(-1) > top_p).all()):
            return values, ids
    values, ids = probabilities.sort(-1, descending=True)
    return values, ids


def _renormalised(values: torch.Tensor) -> torch.Tensor:
    return values / values.sum(-1, keepdim=True)
