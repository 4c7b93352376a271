"""From the target's logits to the distribution a request asked for, and to tokens.

Order: penalties, temperature, min_p, top_k, top_p; each works on what the one before left. The
same path serves every verified position, with the drafts before it counted as output, so a token
is drawn from the same distribution whether it was drafted or not.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
import torch

from draftgate.engine.tree import chain_parents
from draftgate.sampling import SamplingParams

__all__ = ["RowSampler", "draw", "filter_probabilities", "most_likely", "top_logprobs"]

_CANDIDATES = 1024
"""How many likely tokens top_p looks at before it sorts the whole vocabulary."""

_REMEMBERED = 65
"""How many positions' noise a row keeps, those of the longest draft and one more: 0.4 MB each for a
vocabulary of 49,152."""


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
        self.generator = _generator(params.seed, len(output_ids), device)
        self._vocab_size = vocab_size
        self._key = secrets.randbits(64) if params.seed is None else params.seed
        self._noise: dict[int, torch.Tensor] = {}

    def observe(self, token_ids: Sequence[int]) -> None:
        """Count tokens that were emitted."""
        if self._counts is not None and self._seen is not None and token_ids:
            ids = torch.tensor(token_ids, dtype=torch.long, device=self._device)
            self._counts.index_add_(0, ids, torch.ones(len(token_ids), device=self._device))
            self._seen[ids] = True

    def penalised(
        self, logits: torch.Tensor, drafts: Sequence[int], parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """logits [drafts + 1, vocab] in fp32 with penalties: before the drafts, and after each of
        them with those that lead to it counted as output.

        parents: how the drafts follow each other (see `engine.tree`); None: one after the other.
        """
        if self._counts is None or self._seen is None:
            return logits
        counts = self._counts.repeat(logits.shape[0], 1)
        seen = self._seen.repeat(logits.shape[0], 1)
        parents = chain_parents(len(drafts)) if parents is None else parents
        for index, (token, parent) in enumerate(zip(drafts, parents, strict=True), 1):
            counts[index] = counts[parent + 1]
            counts[index, token] += 1
            seen[index] = seen[parent + 1]
            seen[index, token] = True
        params = self.params
        scaled = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits = torch.where(seen, scaled, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def probabilities(
        self, logits: torch.Tensor, drafts: Sequence[int], parents: Sequence[int] | None = None
    ) -> torch.Tensor:
        """The distributions [drafts + 1, vocab] to draw from, in fp32; not for greedy requests.
        Arguments as for `penalised`."""
        scaled = self.penalised(logits, drafts, parents) / self.params.temperature
        return filter_probabilities(scaled.softmax(-1), self.params)

    def coupled(self, probabilities: torch.Tensor, positions: Sequence[int]) -> list[int]:
        """The coupled token at each of the absolute positions, the first of which is the lowest:
        argmax of log p plus position-keyed Gumbel noise.

        A function of the distribution, the seed and the absolute position alone, so it does not
        depend on what was drafted. (Gumbel-max: argmax p / e with e exponential.)
        """
        # What lies before is settled: its noise has done its work.
        for position in [known for known in self._noise if known < positions[0]]:
            del self._noise[position]
        return [
            int((row.double() / self.noise(position)).argmax())
            for row, position in zip(probabilities, positions, strict=True)
        ]

    def noise(self, position: int) -> torch.Tensor:
        """The exponential noise [vocab] of an absolute position, fp64, above 0; not to be changed.

        A function of the seed and the position; without a seed, of one drawn for this row. The
        last few are remembered, so that drafting with it and verifying after it cost one draw.
        """
        found = self._noise.get(position)
        if found is None:
            counter = np.random.Philox(key=self._key, counter=[0, 0, 0, position])
            # In fp32 the noise is 0 once in 10^7 draws, which over a large vocabulary would let a
            # token of no likelihood win every few hundred positions.
            drawn = np.random.Generator(counter).standard_exponential(self._vocab_size)
            found = torch.from_numpy(drawn).to(self._device).clamp_min_(1e-300)
            if len(self._noise) == _REMEMBERED:
                del self._noise[next(iter(self._noise))]
            self._noise[position] = found
        return found


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


def top_logprobs(
    asked: int | None, tokens: tuple[int, ...], logits: torch.Tensor
) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Log-probabilities of the tokens and of the `asked` most likely ones at their positions."""
    if asked is None:
        return (), (), ()
    log_probabilities = logits[: len(tokens)].float().log_softmax(-1)
    ids = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    chosen = log_probabilities.gather(1, ids).squeeze(1).tolist()
    top = log_probabilities.topk(min(asked, logits.shape[-1]), -1)
    return (
        tuple(chosen),
        tuple(tuple(row) for row in top.indices.tolist()),
        tuple(tuple(row) for row in top.values.tolist()),
    )


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


def _generator(seed: int | None, resume_len: int, device: torch.device) -> torch.Generator:
    """The row's random numbers. A resumed run has its own, for those of a fresh one have already
    chosen the tokens that it starts from."""
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
        return generator
    # Mixed, because torch's CPU generator looks at the low 32 bits alone.
    mixed = np.random.SeedSequence(seed, spawn_key=(resume_len,)).generate_state(1, np.uint64)
    return generator.manual_seed(int(mixed[0]))


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
