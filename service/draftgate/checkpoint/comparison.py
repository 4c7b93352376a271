"""How far the prepared model's predictions are from its source's."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from draftgate.checkpoint.architectures import model_shape
from draftgate.checkpoint.files import bad_file, disk_errors, read_json
from draftgate.checkpoint.plain import write_plain
from draftgate.checkpoint.progress import Progress
from draftgate.checkpoint.source import open_source

if TYPE_CHECKING:
    import torch

__all__ = ["Agreement", "Scorer", "agreement", "compare_with_source"]

Scorer = Callable[[Sequence[int]], "torch.Tensor"]
"""Token ids to the logits [tokens, vocab] after each of them."""

_EVALUATION_TEXT = "evaluation.txt"
_WINDOW_TOKENS = 512
"""Longest piece of the text scored at once."""


@dataclass(frozen=True)
class Agreement:
    """Predictions of two models at the same positions."""

    tokens: int
    """Positions compared."""
    top1: float
    """Share of them where both models rank the same token first."""
    mean_kl_nats: float
    """Mean over them of KL(source || checkpoint), in nats per token."""


def compare_with_source(
    folder: Path, source_path: Path, load: Callable[[Path], Scorer], *, progress: Progress
) -> Agreement:
    """Score the shipped evaluation text with the source, then with the checkpoint in `folder`.

    `load` makes a scorer of a Hugging Face folder; one model is loaded at a time. A GGUF source is
    written out as such a folder in the system's temporary directory, and removed again.
    Raises `DraftgateError`: FAILED_PRECONDITION if the two are not the same model's, and what
    `open_source` raises.
    """
    source = open_source(source_path)
    if source.shape != model_shape(read_json(folder / "config.json")):
        raise bad_file(source_path, f"is not the model that {folder} was prepared from")
    windows = _windows(folder, source.shape.max_positions)
    if source_path.is_dir():
        expected = _score(load, source_path, windows, "scoring the source", progress)
    else:
        with (
            disk_errors(Path(tempfile.gettempdir())),
            tempfile.TemporaryDirectory(prefix="draftgate-source-") as plain,
        ):
            write_plain(source, Path(plain), progress=progress)
            expected = _score(load, Path(plain), windows, "scoring the source", progress)
    actual = _score(load, folder, windows, "scoring the checkpoint", progress)
    return agreement(expected, actual)


def agreement(expected: torch.Tensor, actual: torch.Tensor) -> Agreement:
    """Compare logits [tokens, vocab] of the source with those of the checkpoint."""
    import torch

    log_p = torch.log_softmax(expected.double(), dim=-1)
    log_q = torch.log_softmax(actual.double(), dim=-1)
    # A token that p rules out adds nothing, and 0 * -inf would be NaN.
    terms = torch.where(log_p.isneginf(), 0.0, log_p.exp() * (log_p - log_q))
    same = expected.argmax(dim=-1) == actual.argmax(dim=-1)
    return Agreement(
        tokens=len(expected),
        top1=same.double().mean().item(),
        mean_kl_nats=terms.sum(dim=-1).mean().item(),
    )


def _windows(folder: Path, max_positions: int) -> list[list[int]]:
    """The evaluation text as token ids, in pieces that the model can take."""
    from tokenizers import Tokenizer

    text = resources.files("draftgate.checkpoint").joinpath("data", _EVALUATION_TEXT)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    size = min(_WINDOW_TOKENS, max_positions)
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def _score(
    load: Callable[[Path], Scorer],
    folder: Path,
    windows: list[list[int]],
    stage: str,
    progress: Progress,
) -> torch.Tensor:
    import torch

    progress.stage(stage, len(windows))
    score = load(folder)
    logits = []
    for ids in windows:
        logits.append(score(ids))
        progress.advance()
    return torch.cat(logits)
