"""Batches of sequences of like length, with everything that a training step reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.progress import Progress

from draftgate.engine import Target
from training.features import features_path, read_features, write_features
from training.generations import Generation, read_part
from training.network import Unrolled, rows_at

__all__ = ["Batch", "Batches", "Example", "draft_vocabulary", "read_examples"]


@dataclass(frozen=True)
class Example:
    """A generation with its features."""

    generation: Generation
    features: torch.Tensor
    """[tokens - 1, taps * hidden] in bf16, mapped; the last tap is the output of all layers."""

    @property
    def answer_len(self) -> int:
        """Positions that chains can start from and find a token to foretell."""
        return len(self.generation.tokens) - self.generation.prompt_len - 1


@dataclass(frozen=True)
class Batch:
    """Some examples, and what chains drafted from them should say."""

    unrolled: Unrolled
    last_hidden: torch.Tensor
    """[batch, answers + steps, hidden] the target's last hidden states from which the tokens after
    the first of each answer are chosen."""
    valid: torch.Tensor
    """[batch, answers + steps] bool: which of them there are."""
    foretellable: torch.Tensor
    """[batch, answers + steps] bool: whether the token chosen there is in the draft vocabulary."""


def read_examples(folder: Path, target: Target, taps: Sequence[int]) -> list[Example]:
    """Everything generated so far. What has no features yet gets them from a pass of its own."""
    parts = sorted(folder.glob("part-*.npz"))
    _compute_features([p for p in parts if not features_path(p).exists()], target, taps)
    examples = []
    for part in parts:
        features, at = read_features(part), 0
        for generation in read_part(part):
            upto = at + len(generation.tokens) - 1
            examples.append(Example(generation, features[at:upto]))
            at = upto
    return [example for example in examples if example.answer_len >= 4]


def _compute_features(parts: Sequence[Path], target: Target, taps: Sequence[int]) -> None:
    """The files of features that are not there, one beside each part."""
    held = [list(read_part(part)) for part in parts]
    with Progress(disable=not parts) as progress:
        bar = progress.add_task("hidden states (answers)", total=sum(map(len, held)))
        for part, generations in zip(parts, held, strict=True):
            found = []
            for generation in generations:
                found.append(target.features(generation.tokens.tolist(), taps)[:-1])
                progress.advance(bar)
            write_features(part, torch.cat(found))


def draft_vocabulary(
    generations: Sequence[Generation], size: int, vocab_size: int
) -> npt.NDArray[np.int64]:
    """The ids [size] int64, rising, of the tokens that answers use most."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for generation in generations:
        np.add.at(counts, generation.tokens[generation.prompt_len :], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


class Batches:
    """Epochs over the examples, each in a new order that the seed and its number decide."""

    def __init__(
        self,
        examples: Sequence[Example],
        embedding: torch.Tensor,
        vocabulary: torch.Tensor,
        *,
        answer_tokens: int,
        steps: int,
        seed: int,
    ) -> None:
        """embedding: [vocab, hidden] the target's; vocabulary: [draft vocab] its ids that can be
        drafted; answer_tokens: about so many in a batch."""
        self._examples = examples
        self._embedding = embedding
        self._foretold = torch.zeros(len(embedding), dtype=torch.bool)
        self._foretold[vocabulary] = True
        self._steps = steps
        self._seed = seed
        self._answer_tokens = answer_tokens

    def indices(self, epoch: int) -> list[list[int]]:
        """The examples of each batch of an epoch."""
        generator = random.Random(f"{self._seed} {epoch}")
        order = list(range(len(self._examples)))
        generator.shuffle(order)
        # Sorted by length within large random pools: like lengths together, never the same ones.
        pools = [order[at : at + 512] for at in range(0, len(order), 512)]
        batches: list[list[int]] = []
        for pool in pools:
            pool.sort(key=lambda index: self._examples[index].answer_len)
            taken: list[int] = []
            for index in pool:
                longest = self._examples[index].answer_len
                if taken and (len(taken) + 1) * longest > self._answer_tokens:
                    batches.append(taken)
                    taken = []
                taken.append(index)
            batches.append(taken)
        generator.shuffle(batches)
        return batches

    def epoch(self, number: int, first: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from the `first` on."""
        for chosen in self.indices(number)[first:]:
            yield self.batch(chosen)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """These examples side by side."""
        examples = [self._examples[index] for index in chosen]
        tokens = max(len(e.features) for e in examples)
        answers = max(e.answer_len for e in examples)
        hidden, steps = self._embedding.shape[1], self._steps
        taps = examples[0].features.shape[1] // hidden - 1
        features = torch.zeros(len(examples), tokens, taps * hidden, dtype=torch.bfloat16)
        last = torch.zeros(len(examples), answers + steps, hidden, dtype=torch.bfloat16)
        ids = torch.zeros(len(examples), tokens + 1 + steps, dtype=torch.long)
        bases = torch.zeros(len(examples), answers, dtype=torch.long)
        valid = torch.zeros(len(examples), answers + steps, dtype=torch.bool)
        for row, example in enumerate(examples):
            count, first = len(example.features), example.generation.prompt_len - 1
            features[row, :count] = example.features[:, :-hidden]
            ids[row, : count + 1] = torch.from_numpy(example.generation.tokens.astype(np.int64))
            upto = example.answer_len
            bases[row] = (torch.arange(answers) + first).clamp_max_(count - 2)
            last[row, :upto] = example.features[first + 1 :, -hidden:]
            valid[row, :upto] = True
        embedded = self._embedding[ids].to(torch.bfloat16)
        chain = torch.stack(
            [rows_at(embedded, bases + 2 + step) for step in range(steps - 1)], dim=2
        )
        unrolled = Unrolled(features, embedded[:, 1 : tokens + 1], bases, chain)
        following = torch.zeros_like(valid)
        following[:, :answers] = self._foretold[rows_at(ids.unsqueeze(-1), bases + 2).squeeze(-1)]
        return Batch(unrolled, last, valid, following & valid)
