"""Answers are kept with their features, through stops and in shares of several processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from draftgate.engine import Target, load_target
from draftgate.errors import DraftgateError
from tests.support.tiny_models import TINY, write_checkpoint
from training.__main__ import begin
from training.features import read_features
from training.generations import generate, read_part
from training.prompts import Prompt, make_prompts

TAPS = (0, 1, 2)
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that speaks with the packaged one's tokenizer."""
    config = TINY | {"vocab_size": 49152, "eos_token_id": 2}
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(checkpoint_dir / name, folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder, torch.bfloat16)


def run(
    folder: Path, prompts: list[Prompt], out: Path, stop: int | None, worker: int, of: int
) -> None:
    threads = torch.get_num_threads()
    generate(
        folder,
        prompts,
        out,
        max_tokens=MAX_TOKENS,
        stop_after_tokens=stop,
        seed=1,
        taps=TAPS,
        worker=worker,
        workers=of,
    )
    torch.set_num_threads(threads)


def test_a_stop_loses_no_answer_that_was_done(folder: Path, target: Target, tmp_path: Path) -> None:
    prompts = make_prompts(400, held_out=True)[:150]
    assert len({p.key for p in prompts}) == 150
    # More prompts than the engine has rows for: some wait when the first run has enough.
    run(folder, prompts, tmp_path, 5 * MAX_TOKENS, 0, 2)
    first = [g for part in tmp_path.glob("part-*.npz") for g in read_part(part)]
    assert 5 <= len(first) < 75
    for worker in (0, 1):
        # An answer is its prompt's wherever that stands; the workers' shares differ now, too.
        run(folder, prompts[::-1], tmp_path, None, worker, 2)

    parts = sorted(tmp_path.glob("part-*.npz"))
    found = [g for part in parts for g in read_part(part)]
    assert sorted(g.prompt_key for g in found) == sorted(p.key for p in prompts)
    for part in parts:
        features, at = read_features(part), 0
        for made in read_part(part):
            upto = at + len(made.tokens) - 1
            wanted = target.features(made.tokens.tolist(), TAPS)[:-1]
            torch.testing.assert_close(features[at:upto], wanted, rtol=0.05, atol=0.05)
            at = upto
        assert at == len(features)


def test_how_a_prompt_is_answered_depends_on_it_alone(folder: Path, tmp_path: Path) -> None:
    prompts = make_prompts(400, held_out=True)[:30]
    found = []
    for name, asked in (("one", prompts), ("other", prompts[::-1])):
        run(folder, asked, tmp_path / name, None, 0, 1)
        [part] = (tmp_path / name).glob("part-*.npz")
        found.append({g.prompt_key: g.greedy for g in read_part(part)})
    assert found[0] == found[1]
    assert set(found[0].values()) == {True, False}


def test_work_begins_with_the_shipped_answers_or_with_none(tmp_path: Path) -> None:
    shipped, work = tmp_path / "shipped", tmp_path / "work" / "train"
    shipped.mkdir()
    (shipped / "part-0.npz").touch()
    begin(work, None)
    begin(work, shipped)  # goes on with what was begun anew
    assert list(work.iterdir()) == []
    work.rmdir()
    for _ in range(2):
        begin(work, shipped)
        assert [path.name for path in work.iterdir()] == ["part-0.npz"]
    with pytest.raises(DraftgateError, match="without --anew"):
        begin(work, None)
    assert [path.name for path in work.parent.iterdir()] == ["train"]
