"""What stands beside what in a batch, and which prompts are kept for judging."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from training.data import Batches, Example, draft_vocabulary
from training.generations import Generation, read_part
from training.prompts import TASKS, Prompt, make_prompts

HIDDEN, TAPS, STEPS = 2, 3, 3
SIZES = ((5, 12), (9, 11), (3, 40))
"""Prompt and whole length of each generation."""


def generation(index: int, prompt_len: int, length: int) -> Generation:
    tokens = (np.arange(length) + 100 * index).astype(np.uint16)
    return Generation(str(index), "chat", tokens, prompt_len, greedy=True)


def example(index: int, prompt_len: int, length: int) -> Example:
    """Every feature is the number of its token, the last tap's negated."""
    made = generation(index, prompt_len, length)
    numbers = torch.from_numpy(made.tokens[:-1].astype(np.float32)).unsqueeze(1)
    features = torch.cat([numbers.expand(-1, TAPS * HIDDEN), -numbers.expand(-1, HIDDEN)], dim=1)
    return Example(made, features.bfloat16())


@pytest.fixture(scope="module")
def batches() -> Batches:
    embedding = torch.arange(400.0).unsqueeze(1).expand(-1, HIDDEN)  # a token's is its number
    examples = [example(index, *sizes) for index, sizes in enumerate(SIZES)]
    vocabulary = torch.tensor([token for token in range(400) if token % 7])
    return Batches(examples, embedding, vocabulary, answer_tokens=80, steps=STEPS, seed=1)


def test_everything_stands_where_the_chain_will_look(batches: Batches) -> None:
    batch = batches.batch([0, 1, 2])
    given = batch.unrolled
    for row, (prompt_len, length) in enumerate(SIZES):
        first = 100 * row
        for at in range(length - 1):
            assert given.features[row, at, 0] == torch.tensor(first + at).bfloat16()
            assert given.next_embeddings[row, at, 0] == torch.tensor(first + at + 1).bfloat16()
        for answer in range(length - prompt_len - 1):
            base = int(given.bases[row, answer])
            assert base == prompt_len - 1 + answer
            for step in range(STEPS):
                foretold = base + 2 + step  # the token that the chain's draft `step` stands for
                there = foretold < length
                assert bool(batch.valid[row, answer + step]) == there
                if not there:
                    continue
                # The target chose it from its hidden state one before.
                wanted = -torch.tensor(first + foretold - 1).bfloat16()
                assert batch.last_hidden[row, answer + step, 0] == wanted
                assert bool(batch.foretellable[row, answer + step]) == bool((first + foretold) % 7)
                if step:
                    fed = given.chain_embeddings[row, answer, step - 1, 0]
                    assert fed == torch.tensor(first + foretold - 1).bfloat16()
        assert not batch.valid[row, length - prompt_len - 1 :].any()
    assert not (batch.foretellable & ~batch.valid).any()


def test_an_epoch_has_every_example_once_in_an_order_of_its_own(batches: Batches) -> None:
    epochs = [batches.indices(number) for number in range(6)]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == [0, 1, 2]
    assert batches.indices(0) == epochs[0]
    assert len({str(epoch) for epoch in epochs}) > 1


def test_the_vocabulary_is_what_answers_use_most() -> None:
    made = [Generation("0", "chat", np.array([9, 9, 9, 4, 4, 2, 7, 7, 7]), 3, greedy=True)]
    assert draft_vocabulary(made, 2, 10).tolist() == [4, 7]


def test_no_topic_is_both_trained_on_and_held_out() -> None:
    trained = make_prompts(1 << 20, held_out=False)
    held_out = make_prompts(1 << 20, held_out=True)
    assert not {p.topic for p in trained} & {p.topic for p in held_out}
    assert not {p.text for p in trained} & {p.text for p in held_out}
    for prompts in (trained, held_out):
        assert {p.task for p in prompts} == set(TASKS)
        assert len({p.text for p in prompts}) == len({p.key for p in prompts}) == len(prompts)


def test_no_text_is_both_trained_on_and_held_out() -> None:
    """Python repeats paragraphs and functions; a topic of its own does not make them new."""
    trained, held_out = (
        {" ".join(p.quoted.split()) for p in make_prompts(1 << 20, held_out=kept) if p.quoted}
        for kept in (False, True)
    )
    assert len(trained) > 1000
    assert len(held_out) > 100
    assert not {text for text in trained if any(other in text for other in held_out)}


def test_the_shipped_answers_keep_held_out_prompts_apart() -> None:
    root = Path(__file__).parents[2]
    judged = json.loads((root / "benchmarks" / "data" / "held_out.json").read_text())
    held_out = {Prompt(p["task"], p["topic"], p["text"], held_out=True).key for p in judged}
    for folder, kept in (("train", False), ("held-out", True)):
        parts = (root / "training" / "answers" / folder).glob("part-*.npz")
        keys = [g.prompt_key for part in parts for g in read_part(part)]
        assert len(keys) == len(set(keys)) > 0
        assert {key in held_out for key in keys} == {kept}


def test_prompts_are_the_same_each_time_and_in_shares() -> None:
    prompts = make_prompts(1000, held_out=False)
    assert prompts == make_prompts(1000, held_out=False)
    assert [sum(p.task == task for p in prompts) for task in TASKS] == [500, 300, 200]
