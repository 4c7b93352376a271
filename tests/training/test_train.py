"""Training lowers its loss, and goes on after a stop as if there had been none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from draftgate.engine import Target, load_target
from draftgate.engine.weights import CheckpointReader
from draftgate.errors import DraftgateError
from tests.support.tiny_models import TINY, write_checkpoint
from training.agreement import Agreement, _walk
from training.data import Batches, Example
from training.generations import Generation
from training.initial import initialise
from training.loss import Teacher
from training.network import EagleNetwork
from training.train import Recipe, train

TAPS = (0, 1, 2, 3)
RECIPE = Recipe(
    epochs=4, answer_tokens=60, warmup=2, log_every=1, judge_every=5, save_every=1, steps=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = TINY | {"num_hidden_layers": 3, "tie_word_embeddings": True}
    return write_checkpoint(tmp_path_factory.mktemp("model"), config)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, torch.float32)


class Course:
    """Everything that training needs, on a tiny model."""

    def __init__(self, folder: Path, target: Target, seed: int = 0, answers: int = 9) -> None:
        shape, random = target.config.shape, np.random.default_rng(0)
        examples = []
        for index in range(12):
            tokens = random.integers(0, shape.vocab_size, 30).astype(np.uint16)
            features = target.features(tokens.tolist(), TAPS)[:-1].bfloat16()
            made = Generation(str(index), "chat", tokens, 8, greedy=True)
            examples.append(Example(made, features))
        vocabulary = torch.arange(0, shape.vocab_size, 2)
        reader = CheckpointReader(folder)
        self.teacher = Teacher(reader, vocabulary, shape.tied_embeddings, shape.norm_eps)
        self.network = EagleNetwork(shape, 3, len(vocabulary))
        initialise(self.network, reader, self.teacher, shape.layers, seed)
        embedding = reader.stored("model.embed_tokens.weight")
        kept = {"answer_tokens": RECIPE.answer_tokens, "steps": RECIPE.steps, "seed": 0}
        self.batches = Batches(examples[:answers], embedding, vocabulary, **kept)
        kept["steps"] = RECIPE.judged_steps
        self.judges = Batches(examples[9:], embedding, vocabulary, **kept)
        self.held_out = {"chat": examples[9:]}

    def run(self, folder: Path, recipe: Recipe = RECIPE) -> list[dict[str, object]]:
        train(
            self.network,
            self.teacher,
            self.batches,
            self.held_out,
            self.judges,
            folder,
            recipe,
        )
        return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_log_tells(folder: Path, target: Target, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, epochs=12, learning_rate=5e-3)
    log = Course(folder, target).run(tmp_path, recipe)
    losses = [float(str(entry["loss"])) for entry in log if "loss" in entry]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    judged = [entry["chat"] for entry in log if "chat" in entry]
    assert judged
    assert all(len(entry["rates"]) == RECIPE.judged_steps for entry in judged)  # type: ignore[index]


def test_the_seed_decides_the_weights(folder: Path, target: Target, tmp_path: Path) -> None:
    trained = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        course = Course(folder, target, seed)
        (tmp_path / name).mkdir()
        course.run(tmp_path / name)
        trained.append(torch.cat([p.flatten() for p in course.network.state_dict().values()]))
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])


def test_a_stop_changes_nothing(
    folder: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Course(folder, target)
    (tmp_path / "whole").mkdir()
    whole.run(tmp_path / "whole")

    (tmp_path / "parts").mkdir()
    for stop in (3, 10, None):
        course = Course(folder, target)
        with monkeypatch.context() as patch:
            if stop is not None:
                stop_at(patch, stop)
                with pytest.raises(KeyboardInterrupt):
                    course.run(tmp_path / "parts")
            else:
                course.run(tmp_path / "parts")
    for name, parameter in whole.network.state_dict().items():
        assert torch.equal(parameter, course.network.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "message"), [({"warmup": 3}, "'warmup': 2.*'warmup': 3"), ({}, "total")]
)
def test_it_does_not_go_on_in_another_recipe(
    folder: Path, target: Target, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    recipe = dataclasses.replace(RECIPE, epochs=1)
    course = Course(folder, target)
    batches = len(course.batches.indices(0))
    course.run(tmp_path, recipe)
    if not change:  # The same recipe over fewer answers.
        course = Course(folder, target, answers=6)
        message = f"total {batches}, not {len(course.batches.indices(0))}"
    with pytest.raises(DraftgateError, match=message):
        course.run(tmp_path, dataclasses.replace(recipe, **change))


def stop_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Ctrl-C after so many batches in all."""
    from training import train as module

    save = module._save

    def save_and_stop(*arguments: object) -> None:
        save(*arguments)  # type: ignore[arg-type]
        if arguments[3] == number:
            raise KeyboardInterrupt

    patch.setattr(module, "_save", save_and_stop)


def test_verification_is_walked_as_the_engine_walks_it() -> None:
    """Steps begin where the one before ended."""
    found = Agreement((4, 3), (3, 1), 2, (2, 1))
    assert found.acceptance_length == 1 + 3 / 2
    assert (found + found).acceptance_length == found.acceptance_length
    # Steps from tokens 0, 3, 4 of the first answer, from 0 and 1 of the second.
    lengths = [[2, 3, 3, 0, 1], [0, 3, 0, 0, 0]]
    assert _walk(lengths, [5, 5], steps=3) == (5, (3, 2, 1))
