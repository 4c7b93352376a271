"""`python -m training`: from nothing to a drafter, stage by stage; what is done is not done again.

prompts ─▶ generations with the target's hidden states ─▶ training ─▶ the folder to ship
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from draftgate.checkpoint import ConsoleProgress, ensure_checkpoint, packaged_source
from draftgate.engine import load_target
from draftgate.engine.config import ModelConfig
from draftgate.engine.drafters.eagle_head import default_taps
from draftgate.engine.weights import CheckpointReader
from draftgate.errors import DraftgateError, ErrorCode
from training.data import Batches, Example, draft_vocabulary, read_examples
from training.export import export
from training.generations import generate
from training.initial import initialise
from training.loss import Teacher
from training.network import EagleNetwork
from training.prompts import TASKS, make_prompts
from training.train import Recipe, judge, train

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PROMPTS = 14_000
_HELD_OUT = 200
_DRAFT_VOCABULARY = 8192
_SHIPPED = Path(__file__).parent / "answers"

ModelDir = Annotated[Path, typer.Option(help="The target's checkpoint.")]
Work = Annotated[Path, typer.Option(help="Where everything between the stages is kept.")]


@app.command()
def prepare(model_dir: ModelDir) -> None:
    """Prepare the packaged model, unless it is there."""
    with ConsoleProgress(Console(stderr=True)) as progress:
        ensure_checkpoint(packaged_source(), model_dir, progress=progress)


@app.command()
def answers(
    model_dir: ModelDir,
    work: Work,
    tokens: Annotated[int, typer.Option(help="Tokens of answers to train on.")] = 1_150_000,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 224,
    workers: Annotated[int, typer.Option(help="Processes, which share the cores.")] = 2,
    anew: Annotated[bool, typer.Option(help="Do not start from the answers shipped.")] = False,
    worker: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Let the target answer the prompts, held-out ones too."""
    if worker < 0:
        for name in ("train", "held-out"):
            begin(work / name, None if anew else _SHIPPED / name)
        command = [sys.executable, "-m", "training", *sys.argv[1:], "--worker"]
        started = [subprocess.Popen([*command, str(number)]) for number in range(workers)]
        codes = [process.wait() for process in started]
        if any(codes):
            raise typer.Exit(1)
        return
    for folder, count, held_out, wanted in (
        ("train", _PROMPTS, False, tokens // workers),
        ("held-out", _HELD_OUT, True, None),
    ):
        generate(
            model_dir,
            make_prompts(count, held_out=held_out),
            work / folder,
            max_tokens=max_tokens,
            stop_after_tokens=wanted,
            seed=1,
            taps=_taps(ModelConfig.load(model_dir)),
            worker=worker,
            workers=workers,
        )


@app.command()
def head(
    model_dir: ModelDir,
    work: Work,
    out: Annotated[Path, typer.Option(help="The drafter's folder.")],
    epochs: Annotated[int, typer.Option(help="Times over the answers.")] = Recipe.epochs,
) -> None:
    """Train the head on the answers, and write its folder."""
    # The surer the head, the more of its probabilities are denormal: they made a batch take three
    # times as long.
    torch.set_flush_denormal(True)
    recipe = Recipe(epochs=epochs)
    target = load_target(model_dir, torch.bfloat16)
    shape, taps = target.config.shape, _taps(target.config)
    examples = read_examples(work / "train", target, taps)
    held_out = _by_task(read_examples(work / "held-out", target, taps))
    generations = [example.generation for example in examples]
    chosen = draft_vocabulary(generations, _DRAFT_VOCABULARY, shape.vocab_size)
    vocabulary = torch.from_numpy(chosen)
    reader = CheckpointReader(model_dir)
    teacher = Teacher(reader, vocabulary, shape.tied_embeddings, shape.norm_eps)
    network = EagleNetwork(shape, len(taps) - 1, len(vocabulary))
    initialise(network, reader, teacher, shape.layers, recipe.seed)
    embedding = reader.stored("model.embed_tokens.weight")

    def batches(of: Sequence[Example], steps: int) -> Batches:
        return Batches(
            of,
            embedding,
            vocabulary,
            answer_tokens=recipe.answer_tokens,
            steps=steps,
            seed=recipe.seed,
        )

    judged = [example for task in TASKS for example in held_out[task]]
    judges = batches(judged, recipe.judged_steps)
    course = batches(examples, recipe.steps)
    train(network, teacher, course, held_out, judges, work, recipe)
    export(network, vocabulary, target, out)
    print(f"{out}: trained on {sum(e.answer_len for e in examples)} tokens of answers")
    for task, found in judge(network, teacher, held_out, judges, recipe.judged_steps).items():
        rates = " ".join(f"{rate:.3f}" for rate in found.rates)
        print(f"{task}: agreement {rates}, acceptance length {found.acceptance_length:.2f}")


@app.command()
def held_out_prompts(out: Annotated[Path, typer.Option(help="The file to write.")]) -> None:
    """Write the prompts that benchmarks judge drafters by."""
    prompts = make_prompts(_HELD_OUT, held_out=True)
    content = [{"task": p.task, "topic": p.topic, "text": p.text} for p in prompts]
    out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def begin(folder: Path, shipped: Path | None) -> None:
    """A folder of answers to go on with: the shipped ones unless it is there; None: an empty one.

    Raises DraftgateError: ALREADY_EXISTS where it should be empty and is not.
    """
    if shipped is None:
        if any(folder.glob("part-*.npz")):
            raise DraftgateError(
                ErrorCode.ALREADY_EXISTS,
                f"{folder}: has answers already; remove it, or go on with them without --anew",
            )
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.exists():
        half = folder.with_name(f"{folder.name}.half")  # there after a copy that was stopped
        shutil.copytree(shipped, half, dirs_exist_ok=True)
        half.rename(folder)


def _taps(config: ModelConfig) -> tuple[int, ...]:
    """What the head reads, and last the output of all layers, which teaches it."""
    layers = config.shape.layers
    return *default_taps(layers), layers


def _by_task(examples: Sequence[Example]) -> dict[str, list[Example]]:
    """Greedy ones only: that is what is judged."""
    return {
        task: [e for e in examples if e.generation.task == task and e.generation.greedy]
        for task in TASKS
    }


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except DraftgateError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
